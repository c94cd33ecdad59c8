"""Placements whose requests have not ended, with their reservations at workers and in the memory budget."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.ids import DecisionId
from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget
from baton.scheduler.scheduler_budget import PLACEMENT_BYTES
from baton.scheduler.state.cluster_state import ClusterState
from baton.scheduler.state.session_table import SessionKey, session_of_query

MAX_OPEN_PLACEMENTS = 65_536
"""Placements whose requests have not ended. Beyond that, the oldest is released."""


class OpenPlacement(NamedTuple):
    """A placement whose request has not ended.

    ceiling_tokens: prompt tokens that an infinite cache would have had when it was placed.
    """

    placement: Placement
    num_prompt_tokens: int
    session: SessionKey | None = None
    ceiling_tokens: float = 0.0

    @property
    def overlap_blocks(self) -> int:
        """Predicted number of prompt blocks that need not be computed."""
        placement = self.placement
        overlap = placement.prefill_overlap_blocks if placement.prefill is not None else placement.decode_overlap_blocks
        return max(overlap, placement.prefix_source.num_blocks if placement.prefix_source is not None else 0)


class OpenPlacements:
    """The open placements of a scheduler, oldest first.

    A placement whose outcome is never reported, because its gateway died, stays until it is the oldest and
    another one needs its place.
    """

    def __init__(self, state: ClusterState, budget: ByteBudget, *, on_release: Callable[[], None]) -> None:
        """Create the table.

        state: reserves and releases what the placements take at their workers.
        on_release: called after each release.
        """
        self._state = state
        self._on_release = on_release
        self._open: OrderedDict[DecisionId, OpenPlacement] = OrderedDict()
        self._bytes = budget.reserve(Account.PLACEMENTS, 0, "the open placements")

    def add(self, query: PlacementQuery, placement: Placement, now_s: float) -> None:
        """Reserve what a placement takes. Raises OverBudget if the budget holds not even one."""
        self._reserve_bytes()
        self._open[placement.decision_id] = OpenPlacement(placement, query.num_prompt_tokens, session_of_query(query))
        self._state.reserve(placement.decision_id, query, placement, now_s)

    def set_ceiling(self, decision_id: DecisionId, ceiling_tokens: float) -> None:
        """Set the `ceiling_tokens` of a placement, unless it has ended."""
        placed = self._open.get(decision_id)
        if placed is not None:
            self._open[decision_id] = placed._replace(ceiling_tokens=ceiling_tokens)

    def release(self, decision_id: DecisionId) -> OpenPlacement | None:
        """End what a placement has reserved. Returns None if it has ended before."""
        ended = self._open.pop(decision_id, None)
        if ended is not None:
            workers = (ended.placement.prefill, ended.placement.decode)
            self._state.release(decision_id, tuple(w.worker_id for w in workers if w is not None))
            self._bytes.resize(PLACEMENT_BYTES * len(self._open))
            self._on_release()
        return ended

    def _reserve_bytes(self) -> None:
        """Reserve memory for one more open placement. The oldest are released until it fits."""
        while True:
            try:
                if len(self._open) < MAX_OPEN_PLACEMENTS:
                    return self._bytes.resize(PLACEMENT_BYTES * (len(self._open) + 1))
            except OverBudget:
                if not self._open:
                    raise
            self.release(next(iter(self._open)))
