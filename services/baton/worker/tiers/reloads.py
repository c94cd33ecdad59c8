"""Reloads prefixes of prompts from slower tiers into the device's prefix cache.

A reload begins when a job arrives, so it runs while the job waits for its turn. A failed one costs only time:
the engine computes the blocks that are not in the cache. So does one that is much slower than predicted: it
ends after the time that computing takes, with what it has loaded until then.
"""

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.core.cluster.worker_report import ReloadCounts
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_events import Tier
from baton.core.kv.kv_tables import entries_from, hashes_of_prefix
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.engine.kv_cache.content_index import longest_prefix
from baton.engine.retention.content_owner import ContentOwner
from baton.engine.tiers.copy_policy import compute_s, reload_gain_s, reload_pays, reload_wait_s
from baton.engine.tiers.load_times import LoadTimes
from baton.runtime.logging import get_logger
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.tiers.running_calls import CLOCK_S
from baton.worker.tiers.slower_tiers import SlowerTiers

log = get_logger(__name__)

MAX_PEER_SHARE = 0.25
"""Upper bound on the share of blocks into which prefixes for peers are reloaded at a time."""
MAX_RATIOS = 1024
END_S = 0.05
"""Time for the last copies of a reload whose time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """The blocks to reload for one prompt.

    chain: hashes of the blocks of the prefix that is then in the cache
    num_cached_blocks: length of the prefix that is in the cache now
    needed: hashes of all blocks that a continuation sees, over all block tables, in the order of `entries`
    missing: positions in `needed` of those that are not in the cache
    blocks_by_tier: blocks of tokens that are reloaded from each tier
    predicted_s: time of the reload, after those that are under way; None if unknown
    gain_s: how much less that is than computing; infinite if unknown
    wait_s: how long it may take, and how long a job or a peer waits for it
    """

    chain: tuple[BlockHash, ...]
    num_cached_blocks: int
    needed: tuple[BlockHash, ...]
    entries: tuple[int, ...]
    missing: tuple[int, ...]
    blocks_by_tier: Mapping[Tier, int]
    predicted_s: float | None
    gain_s: float
    wait_s: float


@dataclass(slots=True, kw_only=True)
class ReloadTotals:
    """Counters since the start.

    incomplete: reloads that did not load all blocks.
    late: jobs, here or at peers, whose reload took as long as it was worth, so that the rest was computed.
    predicted_s, actual_s: of the reloads that were complete.
    new_ratios: the first over the second of each of them, until metrics have taken it; the last `MAX_RATIOS`
    """

    reloads: int = 0
    incomplete: int = 0
    late: int = 0
    reloaded_tokens: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    new_ratios: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RATIOS))

    @property
    def counts(self) -> ReloadCounts:
        """The reloads by outcome, for reports."""
        return ReloadCounts(complete=self.reloads - self.incomplete, incomplete=self.incomplete, late=self.late)


class Reloads:
    """All reloads of one worker. Used from one event loop."""

    def __init__(
        self, *, engine: Engine, tiers: SlowerTiers, tasks: BackgroundTasks, costs: Callable[[], StepCostModel | None]
    ) -> None:
        self.totals = ReloadTotals()
        self._engine, self._pool = engine, engine.pool
        self._tiers, self._tasks, self._costs = tiers, tasks, costs
        self._accounting = LoadTimes()
        self._running: dict[BlockHash, asyncio.Task[bool]] = {}  # by the first missing block
        self._num_loading_blocks: Counter[Tier] = Counter()
        self._num_blocks_for_peers = 0

    @property
    def num_loading_blocks(self) -> Mapping[Tier, int]:
        """Blocks of the reloads under way, by tier; 0 for other tiers."""
        return self._num_loading_blocks

    def plan(self, hashes: Sequence[BlockHash], *, uses_disk: bool = True) -> ReloadPlan | None:
        """Return what to reload for a prompt with these leading blocks; None if nothing, or if computing it
        is predicted to be as fast.

        What the fastest tier has may pay where all that the tiers have does not. uses_disk: False leaves the
        disk alone.
        """
        pool, best = self._pool, None
        num_cached = pool.lookup_prefix(hashes).num_blocks
        if num_cached == len(hashes) or (not pool.windows.has_windows and not self._tiers.holds(hashes[num_cached])):
            return None
        for tiers in self._tiers.fastest(uses_disk=uses_disk):
            plan = self._plan_from(tiers, hashes, num_cached)
            if plan is not None and (best is None or plan.gain_s >= best.gain_s):
                best = plan
        return best

    async def reload(
        self,
        hashes: Sequence[BlockHash],
        tenant_root: BlockHash = NO_HASH,
        owner: ContentOwner | None = None,
        *,
        uses_disk: bool = True,
    ) -> Mapping[Tier, int]:
        """Reload what pays. Returns how many blocks of the prefix the cache has gained, by tier.

        tenant_root: of the tenant whose prompt it is. owner: of the request that needs the blocks.
        uses_disk: False leaves the disk alone.

        Ends after the time that computing takes at the latest, also if another request's reload of the same
        blocks still runs. If the caller is cancelled, its reload goes on: other requests may want the blocks.
        """
        plan_again = partial(self.plan, hashes, uses_disk=uses_disk)
        first = plan_again()
        if first is None:
            return {}
        before = self._pool.lookup_prefix(hashes).num_blocks
        await self._until_loaded(first, plan_again, tenant_root, owner)
        gained = max(0, self._pool.lookup_prefix(hashes).num_blocks - before)
        by_tier: dict[Tier, int] = {}
        for tier, count in first.blocks_by_tier.items():
            by_tier[tier] = min(count, gained - sum(by_tier.values()))
        if by_tier:  # the rest are blocks that are not needed, because no token sees them
            by_tier[next(reversed(by_tier))] += gained - sum(by_tier.values())
        return by_tier

    def start(
        self, hashes: Sequence[BlockHash], tenant_root: BlockHash = NO_HASH, owner: ContentOwner | None = None
    ) -> None:
        """Reload what pays, in the background, for an owner's request.

        If there is nothing to reload, the prefix on the device counts as used.
        """
        plan = self.plan(hashes)
        if plan is None:
            self._use(hashes, owner)
        elif plan.needed[plan.missing[0]] not in self._running:
            self._start(plan, tenant_root, owner)

    def start_for_peer(
        self, hashes: Sequence[BlockHash], tenant_root: BlockHash = NO_HASH, *, within_s: float
    ) -> Awaitable[object] | None:
        """Start to reload a prefix that a peer cannot read, because the disk alone has a part of it.

        Returns what ends with the reload, about `within_s` later at the latest. It goes on if the peer does
        not wait for it. What is predicted to take longer is left out. Returns None if nothing is left, if the
        disk has nothing of the prefix or does not answer, or if no block is free for it.
        """
        max_blocks = int(MAX_PEER_SHARE * self._pool.num_blocks) - self._num_blocks_for_peers
        plan_again = partial(self._plan_for_peer, hashes, within_s, max_blocks)
        plan = plan_again()
        if plan is None:
            return None
        num_blocks = len(plan.missing)

        def ended(_: asyncio.Task[None]) -> None:
            self._num_blocks_for_peers -= num_blocks

        loading = self._until_loaded(plan, plan_again, tenant_root, None)
        task = self._tasks.start(loading, name="kv-reload-for-peer")
        self._num_blocks_for_peers += num_blocks
        task.add_done_callback(ended)
        return task

    async def _until_loaded(
        self,
        first: ReloadPlan,
        plan_again: Callable[[], ReloadPlan | None],
        tenant_root: BlockHash,
        owner: ContentOwner | None,
    ) -> None:
        """Run a plan, after a reload of the same blocks that runs already. Counts it if it was late."""
        plan: ReloadPlan | None = first
        is_late = False
        try:
            async with asyncio.timeout(first.wait_s + END_S):
                while plan is not None and (running := self._running.get(plan.needed[plan.missing[0]])) is not None:
                    await asyncio.wait((running,))
                    is_late = _was_late(running)
                    plan = plan_again()
                if plan is not None:
                    own = self._start(plan, tenant_root, owner)
                    await asyncio.wait((own,))
                    is_late = _was_late(own)
        except TimeoutError:
            is_late = True
        if is_late:
            self.totals.late += 1
            log.warning("prefix_reload_late", num_blocks=len(first.chain), predicted_s=first.predicted_s)

    def _use(self, hashes: Sequence[BlockHash], owner: ContentOwner | None) -> None:
        """Put the prefix that is on the device into the order of eviction anew."""
        pool = self._pool
        prefix = pool.lookup_prefix(hashes)
        positions = [each // pool.windows.num_tables for each in entries_from(prefix.first_blocks, prefix.num_blocks)]
        pool.ref(prefix.block_ids)
        pool.unref(prefix.block_ids, owner, positions)

    def _plan_for_peer(self, hashes: Sequence[BlockHash], within_s: float, max_blocks: int) -> ReloadPlan | None:
        """Return what to reload for a peer; None if nothing of it is on the disk only, or if nothing pays.

        The peer gives the time that the reload is worth. max_blocks: most blocks to reload
        """
        usable = list(self._tiers.fastest())
        if not usable:
            return None
        tiers, num_cached = usable[-1], self._pool.lookup_prefix(hashes).num_blocks
        if not self._pool.windows.has_windows:  # else a shorter prefix needs other blocks
            hashes = self._longest_in_time(tiers, hashes, within_s)
        plan = self._plan_from(tiers, hashes, num_cached, worth_s=within_s, max_blocks=max_blocks)
        if plan is None or Tier.DISK not in tiers.positions([plan.needed[index] for index in plan.missing]):
            return None
        return plan

    def _longest_in_time(self, tiers: SlowerTiers, hashes: Sequence[BlockHash], within_s: float) -> Sequence[BlockHash]:
        """Return the longest prefix whose reload is predicted to pay if it is worth `within_s`.

        Its blocks may be in no tier. Without windows.
        """
        missing = [index for index, each in enumerate(hashes) if self._pool.find(each) is None]
        lacking = [hashes[index] for index in missing]

        def is_too_slow(count: int) -> bool:
            predicted_s = self._predicted_s(tiers, lacking[:count], missing[count - 1] + 1)
            return not reload_pays(compute_s=within_s, reload_s=predicted_s)

        if not missing or not is_too_slow(len(missing)):
            return hashes
        return hashes[: missing[bisect_left(range(1, len(missing)), True, key=is_too_slow)]]

    def _plan_from(
        self,
        tiers: SlowerTiers,
        hashes: Sequence[BlockHash],
        num_cached: int,
        *,
        worth_s: float | None = None,
        max_blocks: int | None = None,
    ) -> ReloadPlan | None:
        """Return a plan that uses these tiers only, and no more blocks than are free, nor than `max_blocks`.

        worth_s: see `_plan_of`
        """
        pool = self._pool
        num_blocks = longest_prefix(hashes, pool.windows, lambda each: pool.find(each) is not None or tiers.holds(each))
        plan = self._plan_of(tiers, hashes[:num_blocks], num_cached, worth_s)
        if plan is None:
            return None
        num_free = self._num_free_blocks(plan)
        num_lacking = len(plan.missing) - (num_free if max_blocks is None else min(num_free, max_blocks))
        if num_lacking <= 0:
            return plan
        if num_lacking >= len(plan.missing) or pool.windows.has_windows:  # a shorter prefix needs other blocks
            return None
        return self._plan_of(tiers, hashes[: plan.missing[-num_lacking]], num_cached, worth_s)

    def _plan_of(
        self, tiers: SlowerTiers, hashes: Sequence[BlockHash], num_cached: int, worth_s: float | None
    ) -> ReloadPlan | None:
        """Return the plan for a whole prefix. worth_s: what it saves; None: the time to compute it here."""
        pool, size = self._pool, self._pool.block_size_tokens
        num_blocks = len(hashes)
        if num_blocks <= num_cached:
            return None
        needed = hashes_of_prefix(hashes, pool.windows)
        missing = tuple(index for index, each in enumerate(needed) if pool.find(each) is None)
        costs = self._costs()
        predicted_s = self._predicted_s(tiers, [needed[index] for index in missing], len(needed))
        if worth_s is None and costs is not None:
            chunk_tokens = self._engine.config.max_num_batched_tokens
            worth_s = compute_s(costs, (num_blocks - num_cached) * size, num_cached * size, chunk_tokens)
        gain_s = reload_gain_s(compute_s=worth_s, reload_s=predicted_s)
        if not missing or gain_s is None:
            return None
        lacking = [each for each in hashes[num_cached:] if pool.find(each) is None]
        return ReloadPlan(
            chain=tuple(hashes),
            num_cached_blocks=num_cached,
            needed=tuple(needed),
            entries=tuple(entries_from(pool.windows.first_blocks(num_blocks * size), num_blocks)),
            missing=missing,
            blocks_by_tier={tier: len(found) for tier, found in tiers.positions(lacking).items()},
            predicted_s=predicted_s,
            gain_s=gain_s,
            wait_s=reload_wait_s(worth_s),
        )

    def _predicted_s(self, tiers: SlowerTiers, missing: Sequence[BlockHash], num_needed: int) -> float | None:
        """Predict the time to load the missing blocks and enter the prefix in the cache; None if unknown."""
        load_s = tiers.load_s(missing, self._num_loading_blocks)
        if load_s is None:
            return None
        return load_s + (self._accounting.predicted_s(num_needed, asyncio.get_running_loop().time()) or 0.0)

    def _start(self, plan: ReloadPlan, tenant_root: BlockHash, owner: ContentOwner | None) -> asyncio.Task[bool]:
        first = plan.needed[plan.missing[0]]
        positions = self._tiers.positions([plan.needed[index] for index in plan.missing])
        loading = Counter({tier: len(found) for tier, found in positions.items()})

        def ended(_: asyncio.Task[bool]) -> None:
            self._running.pop(first, None)
            self._num_loading_blocks.subtract(loading)

        task = self._running[first] = self._tasks.start(self._run(plan, tenant_root, owner), name="kv-reload")
        self._num_loading_blocks.update(loading)
        task.add_done_callback(ended)
        return task

    async def _run(self, plan: ReloadPlan, tenant_root: BlockHash, owner: ContentOwner | None) -> bool:
        """Fill the missing blocks. The others are referenced, so that the prefix is not evicted meanwhile.

        Returns True if the time was over before all were filled.
        """
        pool, clock = self._pool, asyncio.get_running_loop().time
        held = {index: found for index, each in enumerate(plan.needed) if (found := pool.find(each)) is not None}
        missing = [index for index in range(len(plan.needed)) if index not in held]
        pool.ref(held.values())
        receiving = pool.allocate_receiving(len(missing), [plan.entries[index] for index in missing])
        if receiving is None or not missing:  # meanwhile others took the free blocks, or computed these
            pool.unref(list(held.values()))
            return False
        hashes = [plan.needed[index] for index in missing]
        started_s, num_loaded = clock(), 0
        try:
            num_loaded = await self._tiers.load(hashes, receiving, within_s=plan.wait_s)
            # Content may have been withdrawn while another tier was still loading.
            num_loaded = next((i for i in range(num_loaded) if not self._tiers.holds(hashes[i])), num_loaded)
        finally:
            loaded_s = clock()
            for block_id, block_hash in zip(receiving[:num_loaded], hashes, strict=False):
                pool.mark_received(block_id, block_hash)
            pool.announce(plan.chain, 0, len(plan.chain), is_end=True, tenant_root=tenant_root)
            pool.drop_receiving(receiving[num_loaded:])
            blocks = held | dict(zip(missing, receiving, strict=True))
            positions = [entry // pool.windows.num_tables for entry in plan.entries]
            pool.unref([blocks[index] for index in range(len(plan.needed))], owner, positions)
        ended_s, is_complete = clock(), num_loaded == len(missing)
        took_s = ended_s - started_s
        if is_complete:
            self._accounting.observe(len(plan.needed), ended_s - loaded_s, ended_s)
        self._count(plan, num_loaded, is_complete=is_complete, took_s=took_s)
        return not is_complete and took_s >= plan.wait_s - CLOCK_S

    def _count(self, plan: ReloadPlan, num_loaded: int, *, is_complete: bool, took_s: float) -> None:
        self.totals.reloads += 1
        if not is_complete:
            self.totals.incomplete += 1
            return
        self.totals.reloaded_tokens += (len(plan.chain) - plan.num_cached_blocks) * self._pool.block_size_tokens
        if plan.predicted_s is not None:
            self.totals.predicted_s += plan.predicted_s
            self.totals.actual_s += took_s
            if took_s > 0:
                self.totals.new_ratios.append(plan.predicted_s / took_s)
        log.info("prefix_reloaded", num_blocks=num_loaded, took_s=took_s, predicted_s=plan.predicted_s)

    def _num_free_blocks(self, plan: ReloadPlan) -> int:
        """Return the blocks that may be allocated, apart from those of the prefix.

        The blocks of one token are kept for each running sequence.
        """
        pool = self._pool
        spare = self._engine.running_seqs * pool.windows.num_tables + self._engine.num_reserved_blocks
        own = (found for each in plan.needed if (found := pool.find(each)) is not None)
        return pool.num_allocatable_without(own) - spare


def _was_late(reload: "asyncio.Task[bool]") -> bool:
    """Return what a reload that has ended has returned; False if it failed."""
    return not reload.cancelled() and reload.exception() is None and reload.result()
