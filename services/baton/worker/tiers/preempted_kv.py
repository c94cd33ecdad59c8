"""Brings the KV of preempted sequences back from a slower tier where that is faster than computing it again.

When a sequence is preempted, its full blocks stay in the cache until they are reallocated. If copying and
reloading them is predicted to be faster than computing them, they are copied out before other blocks. When
the sequence could be admitted again, what the cache has lost is reloaded first, if that pays then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from baton.core.kv.kv_tables import hashes_of_prefix
from baton.core.step_cost import StepCostModel
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.outcome import EngineOutcome, PreemptedSequence, ReturningSequence
from baton.engine.tiers.copy_policy import compute_s
from baton.engine.tiers.kv_tier import KvTier
from baton.engine.tiers.way_back import WayBack, choose_way_back
from baton.runtime.logging import get_logger
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.tiers.copy_out import CopyOut
from baton.worker.tiers.reloads import Reloads

log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class WayBackTotals:
    """Counters since the start.

    chosen: preemptions by way.
    predicted_s: predicted seconds of each way, over the preemptions for which both are known.
    """

    chosen: dict[WayBack, int] = field(default_factory=lambda: dict.fromkeys(WayBack, 0))
    predicted_s: dict[WayBack, float] = field(default_factory=lambda: dict.fromkeys(WayBack, 0.0))


class PreemptedKv:
    """Chooses the way back of each preempted sequence of one engine, and reloads.

    Used from one event loop.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        tier: KvTier,
        copy_out: CopyOut,
        reloads: Reloads,
        tasks: BackgroundTasks,
        costs: Callable[[], StepCostModel | None],
        chunk_tokens: int,
        returned: Callable[[int], None],
    ) -> None:
        """`chunk_tokens`: most tokens of a step. `returned`: `EngineLoop.returned`."""
        self.totals = WayBackTotals()
        self._pool, self._tier = pool, tier
        self._copy_out, self._reloads, self._tasks = copy_out, reloads, tasks
        self._costs, self._chunk_tokens, self._returned = costs, chunk_tokens, returned

    def deliver(self, outcome: EngineOutcome) -> None:
        """Handle the preemptions and returns of an outcome."""
        for preempted in outcome.preemptions:
            self._choose(preempted)
        for returning in outcome.returns:
            if self._reloads.plan(returning.hashes) is None:
                self._returned(returning.key)
            else:
                self._tasks.start(self._reload(returning), name="kv-way-back")

    def _choose(self, preempted: PreemptedSequence) -> None:
        """Choose the way back, and demote the blocks if it is a reload.

        The last blocks of a sequence are evicted first, so they are copied first.
        """
        pool, tier, costs = self._pool, self._tier, self._costs()
        needed = hashes_of_prefix(preempted.hashes, pool.windows)
        missing = [each for each in needed if not tier.holds(each)]
        num_tokens = len(preempted.hashes) * pool.block_size_tokens
        decision = choose_way_back(
            compute_s=None if costs is None else compute_s(costs, num_tokens, 0, self._chunk_tokens),
            store_s=self._store_s(len(missing)),
            load_s=tier.load_s(len(needed)) if tier.answers else None,
        )
        self.totals.chosen[decision.way] += 1
        if decision.compute_s is not None and decision.reload_s is not None:
            self.totals.predicted_s[WayBack.RECOMPUTE] += decision.compute_s
            self.totals.predicted_s[WayBack.RELOAD] += decision.reload_s
        log.info(
            "sequence_preempted",
            seq_id=preempted.seq_id,
            num_tokens=num_tokens,
            way_back=decision.way.value,
            compute_s=decision.compute_s,
            reload_s=decision.reload_s,
        )
        if decision.way is WayBack.RELOAD:
            found = (pool.find(each) for each in reversed(missing))
            self._copy_out.demote(block_id for block_id in found if block_id is not None)

    def _store_s(self, num_blocks: int) -> float | None:
        """Predict the time to store blocks, with the pause after an error; None if unknown or never."""
        store_s, pause_s = self._tier.store_s(num_blocks), self._tier.store_pause_s if num_blocks else 0.0
        return None if store_s is None or pause_s == inf else store_s + pause_s

    async def _reload(self, returning: ReturningSequence) -> None:
        try:
            await self._reloads.reload(returning.hashes, returning.tenant_root, returning.owner)
        finally:
            self._returned(returning.key)
