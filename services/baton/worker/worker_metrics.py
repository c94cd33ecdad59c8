"""The metrics of a worker: gauges and counters refreshed at each scrape, steps and transfers recorded as they
end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter

from baton.core.errors import Reason
from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import Tier
from baton.core.kv.kv_layout import KvLayout
from baton.engine.state.step import Executor, StepPlan, StepResult
from baton.runtime.observability.metrics import EngineMetrics, TierMetrics, TransferMetrics
from baton.worker.disk.disk_format import DiskDefect
from baton.worker.tiers.disk_tier import DiskTier

if TYPE_CHECKING:
    from baton.worker.tiers.host_tier import HostTier
    from baton.worker.tiers.reloads import Reloads
    from baton.worker.worker_service import Worker


class MeteredExecutor:
    """Implements `Executor`: forwards to `inner` and records the duration and the tokens of each step."""

    def __init__(self, inner: Executor, metrics: EngineMetrics) -> None:
        self._inner = inner
        self._metrics = metrics
        self._ended_s = 0.0

    @property
    def layout(self) -> KvLayout:
        return self._inner.layout

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    async def execute(self, plan: StepPlan) -> StepResult:
        loop = asyncio.get_running_loop()
        requested_s = loop.time()
        result = await self._inner.execute(plan)
        previous_end_s, self._ended_s = self._ended_s, loop.time()
        self._metrics.step_s.observe(self._ended_s - max(requested_s, previous_end_s))
        self._metrics.step_tokens.inc(plan.num_tokens)
        return result

    def withdraw(self, step_id: int) -> bool:
        return self._inner.withdraw(step_id)

    async def aclose(self) -> None:
        await self._inner.aclose()


class PullMetrics:
    """Implements `TransferObserver`: records pulls and the state of links."""

    def __init__(self, metrics: TransferMetrics) -> None:
        self._metrics = metrics
        self._transports: dict[WorkerRef, str] = {}
        # By worker_id: the incarnation and transport of its bandwidth series. Each peer has only one series.
        self._shown: dict[str, tuple[WorkerRef, str]] = {}
        # By worker_id: the incarnation and the backends of its measured speeds.
        self._measured: dict[str, tuple[WorkerRef, tuple[str, ...]]] = {}
        self._broken: set[WorkerRef] = set()
        self._refused: set[WorkerRef] = set()

    def pull_ended(
        self, owner: WorkerRef, *, reason: Reason | None, transfer_bytes: int, duration_s: float, read_s: float
    ) -> None:
        transport = self._transports.get(owner, "")
        self._metrics.transfers.labels(transport, "received" if reason is None else reason.value).inc()
        self._metrics.bytes.labels(transport).inc(transfer_bytes)
        self._metrics.read_s.labels(transport).inc(read_s)
        if reason is None:
            self._metrics.duration_s.labels(transport).observe(duration_s)

    def validation_failed(self, owner: WorkerRef, what: str) -> None:
        self._metrics.validation_failures.labels(what).inc()

    def blocks_quarantined(self, owner: WorkerRef, num_blocks: int) -> None:
        """Record nothing: quarantined blocks and broken links have gauges of their own."""

    def link_changed(
        self, owner: WorkerRef, *, transport: str, bytes_per_s: float, broken: bool, refused: bool
    ) -> None:
        self._hide(owner.worker_id, unless=transport)
        self._transports[owner] = transport
        self._shown[owner.worker_id] = (owner, transport)
        self._metrics.link_bytes_per_s.labels(owner.worker_id, transport).set(bytes_per_s)
        (self._broken.add if broken else self._broken.discard)(owner)
        (self._refused.add if refused else self._refused.discard)(owner)
        self._set_unused_links()

    def backends_measured(self, owner: WorkerRef, bytes_per_s: Mapping[str, float]) -> None:
        self._hide_measured(owner.worker_id)
        self._measured[owner.worker_id] = (owner, tuple(bytes_per_s))
        for transfer, rate in bytes_per_s.items():
            self._metrics.backend_bytes_per_s.labels(owner.worker_id, transfer).set(rate)

    def forget_gone(self, known: set[WorkerRef]) -> None:
        """Remove links to workers that have left, and to earlier incarnations of workers."""
        self._broken &= known
        self._refused &= known
        for worker_id in [worker_id for worker_id, (owner, _) in self._shown.items() if owner not in known]:
            self._hide(worker_id)
        for worker_id in [worker_id for worker_id, (owner, _) in self._measured.items() if owner not in known]:
            self._hide_measured(worker_id)
        self._transports = {owner: transport for owner, transport in self._transports.items() if owner in known}
        self._set_unused_links()

    def _set_unused_links(self) -> None:
        self._metrics.broken_links.set(len(self._broken))
        self._metrics.refused_links.set(len(self._refused))

    def _hide_measured(self, worker_id: str) -> None:
        _owner, transfers = self._measured.pop(worker_id, (None, ()))
        for transfer in transfers:
            self._metrics.backend_bytes_per_s.remove(worker_id, transfer)

    def _hide(self, worker_id: str, *, unless: str | None = None) -> None:
        """Remove the series of a peer, unless its transport is `unless`."""
        shown = self._shown.get(worker_id)
        if shown is not None and shown[1] != unless:
            del self._shown[worker_id]
            self._metrics.link_bytes_per_s.remove(worker_id, shown[1])


class WorkerMetrics:
    """All metrics of one worker in one registry; `refresh` before they are read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.engine = EngineMetrics(registry)
        self.tier = TierMetrics(registry)
        self.transfer = TransferMetrics(registry)
        self.pulls = PullMetrics(self.transfer)
        self._seen: dict[Counter, float] = {}

    def identify(self, worker: WorkerRef, role: str) -> None:
        """Set the info series of this process, so that queries can join on worker, role and epoch."""
        self.engine.info.labels(worker.worker_id, role, f"{worker.worker_epoch:016x}").set(1)

    def refresh(self, worker: Worker) -> None:
        """Read the current values from `worker`. Called before each scrape."""
        counts, engine, owner, kv = worker.pool.counts(), worker.engine, worker.owner.counts, worker.kv
        for state in ("free", "used", "cached", "receiving", "quarantined"):
            self.engine.blocks.labels(Tier.DEVICE.value, state).set(getattr(counts, state))
        for tier in kv.tiers:
            self._refresh_tier(tier)
            if isinstance(tier, DiskTier):
                for defect in DiskDefect:
                    self._raise_to(self.tier.disk_defects.labels(defect.value), tier.defects[defect])
        if kv.reloads is not None:
            self._refresh_reloads(kv.reloads)
        if kv.preempted_kv is not None:
            for way, number in kv.preempted_kv.totals.chosen.items():
                self._raise_to(self.tier.preemptions_by_way.labels(way.value), number)
            for way, seconds in kv.preempted_kv.totals.predicted_s.items():
                self._raise_to(self.tier.predicted_way_back_s.labels(way.value), seconds)
        for of_tier, order in ((Tier.DEVICE, kv.retention.device), (Tier.HOST, kv.retention.host)):
            if order is not None:
                self.engine.retained_blocks.labels(of_tier.value).set(order.num_retained)
        if kv.prefetches is not None:
            self._raise_to(self.tier.prefetches.labels("started"), kv.prefetches.totals.started)
            self._raise_to(self.tier.prefetches.labels("early"), kv.prefetches.totals.early)
            self._raise_to(self.tier.prefetches.labels("refused"), kv.retention.owners.turns.num_refused)
        self.engine.blocks_held_for_others.set(counts.held_for_others)
        self.engine.running_seqs.set(engine.running_seqs)
        self.engine.waiting_seqs.set(engine.waiting_seqs)
        self.engine.waiting_prefill_tokens.set(engine.waiting_prefill_tokens)
        self._raise_to(self.engine.preemptions, engine.counters.preemptions)
        self._raise_to(self.engine.preempted_tokens, engine.counters.lost_tokens)
        self._raise_to(self.engine.recomputed_tokens, engine.counters.recomputed_tokens)
        for drafter, drafts in engine.counters.drafts.items():
            self._raise_to(self.engine.draft_tokens.labels(drafter), drafts.verified)
            self._raise_to(self.engine.accepted_draft_tokens.labels(drafter), drafts.accepted)
        self._raise_to(self.engine.evictions, worker.pool.num_evicted)
        if worker.publisher is not None:
            self._raise_to(self.engine.kv_resets, worker.publisher.num_resets)
            self.engine.kv_publisher_behind.set(worker.publisher.is_behind)
        self.transfer.open_leases.set(worker.owner.open_leases)
        for outcome, number in (
            ("released", owner.released),
            ("abandoned", owner.abandoned),
            ("expired", owner.leases_ended),
            ("unclaimed", owner.unclaimed),
        ):
            self._raise_to(self.transfer.leases_ended.labels(outcome), number)
        for kind in ("dropped_notices", "early_follows", "refused_follows"):
            self._raise_to(self.transfer.unexpected_messages.labels(kind), getattr(owner, kind))
        self.pulls.forget_gone({link.peer for link in worker.reader.links()})

    def _refresh_tier(self, tier: HostTier | DiskTier) -> None:
        counts, name, totals = tier.counts(), tier.tier.value, tier.totals
        for state, number in (("free", counts.free), ("cached", counts.held), ("used", counts.busy)):
            self.engine.blocks.labels(name, state).set(number)
        for direction, blocks, num_bytes, seconds in (
            ("store", totals.stored_blocks, totals.stored_bytes, totals.store_s),
            ("load", totals.loaded_blocks, totals.loaded_bytes, totals.load_s),
        ):
            self._raise_to(self.tier.copied_blocks.labels(name, direction), blocks)
            self._raise_to(self.tier.copied_bytes.labels(name, direction), num_bytes)
            self._raise_to(self.tier.copy_s.labels(name, direction), seconds)
        self._raise_to(self.tier.failed_copies.labels(name), totals.failed_copies)
        self._raise_to(self.tier.invalid_blocks.labels(name), totals.invalid_blocks)

    def _refresh_reloads(self, reloads: Reloads) -> None:
        self._raise_to(self.tier.reloaded_tokens, reloads.totals.reloaded_tokens)
        self._raise_to(self.tier.reloads.labels("complete"), reloads.totals.reloads - reloads.totals.incomplete)
        self._raise_to(self.tier.reloads.labels("incomplete"), reloads.totals.incomplete)
        self._raise_to(self.tier.late_reloads, reloads.totals.late)
        while reloads.totals.new_ratios:
            self.tier.reload_ratio.observe(reloads.totals.new_ratios.popleft())
        self._raise_to(self.tier.reload_s, reloads.totals.actual_s)
        self._raise_to(self.tier.predicted_reload_s, reloads.totals.predicted_s)

    def _raise_to(self, counter: Counter, total: float) -> None:
        counter.inc(total - self._seen.get(counter, 0))
        self._seen[counter] = total
