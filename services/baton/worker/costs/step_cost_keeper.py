"""Keeps the step costs of a worker: loads or measures them at start, corrects them with each step, stores
them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b

from baton.core.errors import StoreUnavailable
from baton.core.interfaces import CostStore
from baton.core.step_cost import COSTS_VERSION, CostCorrection, StepCostModel, StepWork
from baton.engine.state.step import StepPlan
from baton.runtime.logging import get_logger

log = get_logger(__name__)

SAVE_S = 30.0
"""Interval of writes to the store. One more write follows when the worker ends."""
COSTS_TTL_S = 30 * 86_400.0
"""Time after which the store removes costs that no worker has written again."""


def work_of(plan: StepPlan) -> StepWork:
    """Return the work of a step. A prompt chunk of one token counts as decode work, which costs the same."""
    final = [(s.num_scheduled_tokens - s.num_drafts, s) for s in plan.sequences]
    return StepWork.of(
        ((num_tokens, s.kv_begin) for num_tokens, s in final if num_tokens > 1),
        (s.kv_begin for num_tokens, s in final if num_tokens == 1),
        ((s.num_drafts, s.kv_begin + 1) for s in plan.sequences if s.num_drafts),
    )


def step_costs_key(*parts: str | int) -> str:
    """Return the key under which step costs are stored, derived from everything that decides what a step
    costs."""
    return blake2b("\n".join(str(part) for part in (COSTS_VERSION, *parts)).encode(), digest_size=16).hexdigest()


class CostKeeper:
    """The current step costs of one worker. Used from the worker's event loop only.

    Without initial costs it stays empty. Corrected costs go to the store, where the next worker of the same
    kind finds them.
    """

    def __init__(self, costs: StepCostModel | None, store: CostStore | None = None, key: str = "") -> None:
        """`key`: see `step_costs_key`; if it is empty, nothing is stored."""
        self._correction = None if costs is None else CostCorrection(costs)
        self._store = store if key else None
        self._key = key
        self._is_changed = False

    @property
    def costs(self) -> StepCostModel | None:
        """The corrected costs, or None if they are unknown."""
        return None if self._correction is None else self._correction.costs

    def observe(self, work: StepWork, step_s: float) -> None:
        """Correct the costs with a step that took `step_s` seconds. A step without sequences is ignored."""
        if self._correction is not None and (work.num_prefill_tokens or work.num_decode_seqs):
            self._correction.observe(work, step_s)
            self._is_changed = True

    async def run(self) -> None:
        """Write the costs to the store every `SAVE_S` and on cancellation.

        A failed write is repeated at the next one.
        """
        try:
            while True:
                await asyncio.sleep(SAVE_S)
                await self._save()
        finally:
            await self._save()

    async def _save(self) -> None:
        costs = self.costs
        if self._store is None or costs is None or not self._is_changed:
            return
        with suppress(StoreUnavailable):
            await self._store.put(self._key, costs, COSTS_TTL_S)
            self._is_changed = False


async def known_or_measured(
    store: CostStore, key: str, measure: Callable[[], Awaitable[StepCostModel | None]]
) -> StepCostModel | None:
    """Return the stored costs of `key`, or else measure them and store the result.

    None if measuring fails.
    """
    costs = await _stored(store, key)
    if costs is None:
        costs = await measure()
        if costs is not None:
            with suppress(StoreUnavailable):
                await store.put(key, costs, COSTS_TTL_S)
    return costs


async def _stored(store: CostStore, key: str) -> StepCostModel | None:
    try:
        return await store.get(key)
    except StoreUnavailable as error:
        log.warning("store_read_failed", use="step_costs", problem=str(error))
        return None
