"""`WorkerTiers`: the slower tiers of one worker, and what copies, reloads, retains and erases KV in them."""

import asyncio
from collections.abc import Awaitable, Callable

from baton.core.cluster.worker_report import ReloadCounts, TierReport
from baton.core.messages.peer_messages import HashRange
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.engine.state.outcome import EngineOutcome
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.jobs.leg import chain_tenant
from baton.worker.tiers.clear_tenant import clear_tenant
from baton.worker.tiers.copy_out import CopyOut
from baton.worker.tiers.copy_pacing import CopyPacing
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.host_tier import HostTier
from baton.worker.tiers.preempted_kv import PreemptedKv
from baton.worker.tiers.prefetches import Prefetches
from baton.worker.tiers.reloads import Reloads
from baton.worker.tiers.retention import Retention
from baton.worker.tiers.slower_tiers import SlowerTiers
from baton.worker.tiers.warm_start import WarmStart
from baton.worker.worker_parts import WorkerParts


class WorkerTiers:
    """The tiers below the device of one worker, and the order of eviction of all tiers.

    tiers: the fastest first; empty if there are none
    reloads, prefetches, preempted_kv: None without a tier
    """

    def __init__(
        self,
        parts: WorkerParts,
        engine: Engine,
        *,
        tasks: BackgroundTasks,
        costs: Callable[[], StepCostModel | None],
        returned: Callable[[int], None],
        on_stored: Callable[[], None],
    ) -> None:
        """Follow the pool of `parts`. `start` copies.

        returned: `EngineLoop.returned`. on_stored: called when the content of a tier has changed.
        """
        self.tiers = parts.tiers
        self._engine, self._costs = engine, costs
        self._pool, self._layout, self._tasks = parts.pool, parts.executor.layout, tasks
        chunk_tokens = parts.engine_config.max_num_batched_tokens
        self.retention = Retention(
            parts.pool,
            parts.host_tier,
            policy=parts.config.kv_eviction,
            retain_memory=parts.config.kv_retain_memory,
            block_bytes=self._layout.block_bytes,
            chunk_tokens=chunk_tokens,
            costs=costs,
            clock=lambda: asyncio.get_running_loop().time(),
        )
        pacing = CopyPacing(lambda: not engine.is_idle)
        self.copies_out = [
            CopyOut(
                parts.pool,
                tier,
                block_bytes=tier.block_bytes,
                chunk_tokens=chunk_tokens,
                costs=costs,
                pacing=pacing,
                on_stored=on_stored,
                to_copy=self.retention.to_copy if tier is parts.host_tier else lambda: None,
            )
            for tier in self.tiers
        ]
        self.reloads: Reloads | None = None
        self.prefetches: Prefetches | None = None
        self.preempted_kv: PreemptedKv | None = None
        if not self.tiers:
            return
        self.reloads = Reloads(engine=engine, tiers=SlowerTiers(self.tiers), tasks=tasks, costs=costs)
        self.prefetches = Prefetches(self.reloads, self.tiers, self.retention.owners)
        self.preempted_kv = PreemptedKv(
            pool=parts.pool,
            tier=self.tiers[0],  # the fastest keeps what preempted sequences need again
            copy_out=self.copies_out[0],
            reloads=self.reloads,
            tasks=tasks,
            costs=costs,
            chunk_tokens=chunk_tokens,
            returned=returned,
        )

    def start(self, on_measured: Callable[[], None]) -> None:
        """Begin to copy idle blocks to each tier. `on_measured`: called when the speed of one is known."""
        for copy_out, tier in zip(self.copies_out, self.tiers, strict=True):
            self._tasks.start(self._copy_out(copy_out, tier, on_measured), name=f"worker-copy-out-{tier.tier.value}")

    def deliver(self, outcome: EngineOutcome) -> None:
        """Handle the preemptions and returns of an outcome."""
        if self.preempted_kv is not None:
            self.preempted_kv.deliver(outcome)

    def reports(self) -> tuple[TierReport, ...]:
        """Return the state of each tier for schedulers."""
        if self.reloads is None:
            return ()
        loading = self.reloads.num_loading_blocks
        return tuple(tier.report(loading[tier.tier]) for tier in self.tiers)

    @property
    def reload_counts(self) -> ReloadCounts:
        """Reloads since the start, by outcome."""
        return ReloadCounts() if self.reloads is None else self.reloads.totals.counts

    def reload_for_peer(self, prefix: HashRange) -> Awaitable[object] | None:
        """Start to reload what a peer cannot read of a prefix; see `Reloads.start_for_peer`."""
        if self.reloads is None:
            return None
        layout = self._layout
        root = chain_tenant(layout.model_fingerprint, prefix.cache_salt, layout.block_size_tokens)
        return self.reloads.start_for_peer(prefix.hashes, root, within_s=prefix.reload_within_s)

    async def clear_tenant(self, tenant_salt: bytes) -> None:
        """Erase the cached KV of the tenant with this salt on the device and in all tiers."""
        layout = self._layout
        root = chain_tenant(layout.model_fingerprint, tenant_salt, layout.block_size_tokens)
        await clear_tenant(self._pool, self.tiers, root)

    def check(self) -> None:
        """Check the slots of all tiers. For tests. Raises AssertionError."""
        for tier in self.tiers:
            tier.slots.check()

    @property
    def is_busy(self) -> bool:
        """True while slots are written, or read although their content was discarded."""
        return any(tier.counts().busy for tier in self.tiers)

    def close(self) -> None:
        """Forget all announced turns."""
        if self.prefetches is not None:
            self.prefetches.close()

    async def _copy_out(self, copy_out: CopyOut, tier: HostTier | DiskTier, on_measured: Callable[[], None]) -> None:
        """Measure a tier, then copy idle blocks into it until this task is cancelled.

        What an earlier process has left on the disk is loaded meanwhile.
        """
        await tier.measure(self._pool.num_blocks)
        on_measured()
        if isinstance(tier, DiskTier) and self.reloads is not None:
            warm_start = WarmStart(engine=self._engine, disk=tier, reloads=self.reloads, costs=self._costs)
            self._tasks.start(warm_start.run(), name="worker-warm-start")
        await copy_out.run()
