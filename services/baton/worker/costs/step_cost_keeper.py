"""What this worker's steps cost: where that comes from when it starts, and how it follows what steps really
take."""

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
"""Between two writes to the store; one more when the worker ends."""
COSTS_TTL_S = 30 * 86_400.0
"""How long the store keeps what no worker has told again."""


def work_of(plan: StepPlan) -> StepWork:
    """A prompt's last token alone is the same work as a decoding sequence's next one, and counts as that."""
    return StepWork.of(
        ((s.num_scheduled_tokens, s.kv_begin) for s in plan.sequences if s.num_scheduled_tokens > 1),
        (s.kv_begin for s in plan.sequences if s.num_scheduled_tokens == 1),
    )


def step_costs_key(*parts: str | int) -> str:
    """Return the key under which step costs are stored, derived from everything that decides what a step costs."""
    return blake2b("\n".join(str(part) for part in (COSTS_VERSION, *parts)).encode(), digest_size=16).hexdigest()


class CostKeeper:
    """The costs of one worker as they are now, and in the store for the next one of its kind. Without any to
    begin with it keeps none. Single owner: the worker's event loop."""

    def __init__(self, costs: StepCostModel | None, store: CostStore | None = None, key: str = "") -> None:
        """`key`: of all that decides what a step costs; empty: nothing is stored."""
        self._correction = None if costs is None else CostCorrection(costs)
        self._store = store if key else None
        self._key = key
        self._is_changed = False

    @property
    def costs(self) -> StepCostModel | None:
        return None if self._correction is None else self._correction.costs

    def observe(self, plan: StepPlan, step_s: float) -> None:
        """A step that ran as it was planned."""
        if self._correction is not None and plan.sequences:
            self._correction.observe(work_of(plan), step_s)
            self._is_changed = True

    async def run(self) -> None:
        """Save now and then, and when cancelled. A store that is away gets them the next time."""
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
    """What the store has for `key`, as steps have corrected it; else what `measure` finds, which is then kept
    there."""
    costs = await _kept(store, key)
    if costs is None:
        costs = await measure()
        if costs is not None:
            with suppress(StoreUnavailable):
                await store.put(key, costs, COSTS_TTL_S)
    return costs


async def _kept(store: CostStore, key: str) -> StepCostModel | None:
    try:
        return await store.get(key)
    except StoreUnavailable as error:
        log.warning("costs_store_away", problem=str(error))
        return None
