"""The record of one placement decision."""

from dataclasses import dataclass, field

from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.ids import DecisionId, WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker that was considered for one side of a request.

    side: "prefill" or "decode".
    terms: the numbers by which the policy compared it. Names that end in `_s` are predicted seconds.
    excluded: why it was not chosen; empty if it could have been.
    """

    worker: WorkerRef
    side: str
    terms: dict[str, float] = field(default_factory=dict)
    excluded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """The decision about one attempt, its candidates, and the measured outcome.

    num_excluded: number of workers that were not chosen, by reason.
    actuals: the measured outcome (`RequestActuals`); empty until the request has ended.
    inputs: JSON text from which the decision can be repeated (`scheduler.decisions.decision_records`); empty
        if it cannot be.
    """

    decision_id: DecisionId
    scheduler_id: str
    policy: str
    request_id: bytes
    attempt: int
    query: PlacementQuery
    placement: Placement | None
    rejection: Rejection | None
    candidates: tuple[Candidate, ...] = ()
    num_excluded: dict[str, int] = field(default_factory=dict)
    actuals: dict[str, object] = field(default_factory=dict)
    inputs: str = ""

    def is_chosen(self, candidate: Candidate) -> bool:
        """Return True if the candidate got its side of the request.

        A worker that computes the prompt and decodes, too, got both sides.
        """
        if self.placement is None:
            return False
        of_prefill = self.placement.prefill or self.placement.decode
        of_decode = self.placement.decode or self.placement.prefill
        chosen = of_prefill if candidate.side == "prefill" else of_decode
        return chosen is not None and chosen.is_same_incarnation(candidate.worker)
