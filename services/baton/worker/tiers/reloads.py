"""Reloads prefixes of prompts from a slower tier into the device's prefix cache.

A reload begins when a job arrives, so it runs while the job waits for its turn. A failed one costs only time:
the engine computes the blocks that are not in the cache. So does one that is much slower than predicted: the
job waits for it no longer than computing takes.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_tables import entries_from, hashes_of_prefix
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.engine.kv_cache.content_index import longest_prefix
from baton.engine.tiers.copy_policy import compute_s, reload_pays, reload_wait_s
from baton.engine.tiers.kv_tier import KvTier
from baton.runtime.logging import get_logger
from baton.worker.background_tasks import BackgroundTasks

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """The blocks to reload for one prompt.

    chain: hashes of the blocks of the prefix that is then in the cache
    num_cached_blocks: length of the prefix that is in the cache now
    needed: hashes of all blocks that a continuation sees, over all block tables, in the order of `entries`
    missing: positions in `needed` of those that are not in the cache
    predicted_s: time of the reload, after those that are under way; None if unknown
    computed_s: time to compute the same tokens; None if unknown
    """

    chain: tuple[BlockHash, ...]
    num_cached_blocks: int
    needed: tuple[BlockHash, ...]
    entries: tuple[int, ...]
    missing: tuple[int, ...]
    predicted_s: float | None
    computed_s: float | None


@dataclass(slots=True, kw_only=True)
class ReloadTotals:
    """Counters since the start.

    incomplete: reloads that did not load all blocks.
    late: jobs that have not waited for the end of their reload.
    predicted_s, actual_s: of the reloads that were complete.
    """

    reloads: int = 0
    incomplete: int = 0
    late: int = 0
    reloaded_tokens: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0


class Reloads:
    """All reloads of one worker. Used from one event loop."""

    def __init__(
        self, *, engine: Engine, tier: KvTier, tasks: BackgroundTasks, costs: Callable[[], StepCostModel | None]
    ) -> None:
        self.totals = ReloadTotals()
        self._engine, self._pool = engine, engine.pool
        self._tier, self._tasks, self._costs = tier, tasks, costs
        self._running: dict[BlockHash, asyncio.Task[None]] = {}  # by the first missing block
        self._num_loading_blocks = 0

    @property
    def num_loading_blocks(self) -> int:
        """Blocks of the reloads under way."""
        return self._num_loading_blocks

    def plan(self, hashes: Sequence[BlockHash]) -> ReloadPlan | None:
        """Return what to reload for a prompt with these leading blocks; None if nothing, or if computing it
        is predicted to be as fast."""
        pool, tier = self._pool, self._tier
        num_cached = pool.lookup_prefix(hashes).num_blocks
        if num_cached == len(hashes) or (not pool.windows.has_windows and not tier.holds(hashes[num_cached])):
            return None
        num_blocks = longest_prefix(hashes, pool.windows, lambda each: pool.find(each) is not None or tier.holds(each))
        plan = self._plan_of(hashes[:num_blocks], num_cached)
        if plan is None or (num_lacking := len(plan.missing) - self._num_free_blocks(plan)) <= 0:
            return plan
        if num_lacking >= len(plan.missing) or pool.windows.has_windows:  # a shorter prefix needs other blocks
            return None
        return self._plan_of(hashes[: plan.missing[-num_lacking]], num_cached)

    async def reload(self, hashes: Sequence[BlockHash]) -> int:
        """Reload what pays. Returns how many blocks of the prefix the cache has gained.

        Waits for at most `reload_wait_s`. The reload goes on after that, or if the caller is cancelled: other
        requests may want the same blocks.
        """
        plan = self.plan(hashes)
        if plan is None:
            return 0
        before = self._pool.lookup_prefix(hashes).num_blocks
        try:
            async with asyncio.timeout(reload_wait_s(plan.computed_s)):
                while plan is not None and (running := self._running.get(plan.needed[plan.missing[0]])) is not None:
                    await asyncio.wait((running,))
                    plan = self.plan(hashes)
                if plan is not None:
                    await asyncio.wait((self._start(plan),))
        except TimeoutError:
            self.totals.late += 1
            log.warning("prefix_reload_late", num_blocks=len(hashes), predicted_s=plan.predicted_s if plan else None)
        return max(0, self._pool.lookup_prefix(hashes).num_blocks - before)

    def start(self, hashes: Sequence[BlockHash]) -> None:
        """Reload what pays, in the background."""
        plan = self.plan(hashes)
        if plan is not None and plan.needed[plan.missing[0]] not in self._running:
            self._start(plan)

    def _plan_of(self, hashes: Sequence[BlockHash], num_cached: int) -> ReloadPlan | None:
        pool, size = self._pool, self._pool.block_size_tokens
        num_blocks = len(hashes)
        if num_blocks <= num_cached:
            return None
        needed = hashes_of_prefix(hashes, pool.windows)
        missing = tuple(index for index, each in enumerate(needed) if pool.find(each) is None)
        costs = self._costs()
        predicted_s = self._tier.load_s(self._num_loading_blocks + len(missing))
        computed_s = None
        if costs is not None:
            chunk_tokens = self._engine.config.max_num_batched_tokens
            computed_s = compute_s(costs, (num_blocks - num_cached) * size, num_cached * size, chunk_tokens)
        if not missing or not reload_pays(compute_s=computed_s, reload_s=predicted_s):
            return None
        return ReloadPlan(
            chain=tuple(hashes),
            num_cached_blocks=num_cached,
            needed=tuple(needed),
            entries=tuple(entries_from(pool.windows.first_blocks(num_blocks * size), num_blocks)),
            missing=missing,
            predicted_s=predicted_s,
            computed_s=computed_s,
        )

    def _start(self, plan: ReloadPlan) -> asyncio.Task[None]:
        first, num_blocks = plan.needed[plan.missing[0]], len(plan.missing)

        def ended(_: asyncio.Task[None]) -> None:
            self._running.pop(first, None)
            self._num_loading_blocks -= num_blocks

        task = self._running[first] = self._tasks.start(self._run(plan), name="kv-reload")
        self._num_loading_blocks += num_blocks
        task.add_done_callback(ended)
        return task

    async def _run(self, plan: ReloadPlan) -> None:
        """Fill the missing blocks. The others are referenced, so that the prefix is not evicted meanwhile."""
        pool, clock = self._pool, asyncio.get_running_loop().time
        held = {index: found for index, each in enumerate(plan.needed) if (found := pool.find(each)) is not None}
        missing = [index for index in range(len(plan.needed)) if index not in held]
        pool.ref(held.values())
        receiving = pool.allocate_receiving(len(missing), [plan.entries[index] for index in missing])
        if receiving is None or not missing:  # meanwhile others took the free blocks, or computed these
            pool.unref(list(held.values()))
            return
        hashes = [plan.needed[index] for index in missing]
        started_s, num_loaded = clock(), 0
        try:
            num_loaded = await self._tier.load(hashes, receiving)
        finally:
            for block_id, block_hash in zip(receiving[:num_loaded], hashes, strict=False):
                pool.mark_received(block_id, block_hash)
            pool.announce(plan.chain, 0, len(plan.chain), is_end=True)
            pool.drop_receiving(receiving[num_loaded:])
            blocks = held | dict(zip(missing, receiving, strict=True))
            pool.unref([blocks[index] for index in range(len(plan.needed))])
        self._count(plan, num_loaded, is_complete=num_loaded == len(missing), took_s=clock() - started_s)

    def _count(self, plan: ReloadPlan, num_loaded: int, *, is_complete: bool, took_s: float) -> None:
        self.totals.reloads += 1
        if not is_complete:
            self.totals.incomplete += 1
            return
        self.totals.reloaded_tokens += (len(plan.chain) - plan.num_cached_blocks) * self._pool.block_size_tokens
        if plan.predicted_s is not None:
            self.totals.predicted_s += plan.predicted_s
            self.totals.actual_s += took_s
        log.info("prefix_reloaded", num_blocks=num_loaded, took_s=took_s, predicted_s=plan.predicted_s)

    def _num_free_blocks(self, plan: ReloadPlan) -> int:
        """Return the blocks that may be allocated, apart from those of the prefix.

        The blocks of one token are kept for each running sequence.
        """
        pool = self._pool
        spare = self._engine.running_seqs * pool.windows.num_tables + self._engine.num_reserved_blocks
        num_own = pool.num_idle(found for each in plan.needed if (found := pool.find(each)) is not None)
        return pool.num_allocatable - num_own - spare
