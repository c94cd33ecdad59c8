"""The record of one placement decision."""

from dataclasses import dataclass, field

from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.ids import DecisionId, WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One considered worker and why it lost; terms in seconds where the policy predicts them."""

    worker: WorkerRef
    side: str
    terms: dict[str, float] = field(default_factory=dict)
    excluded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What was decided and from what; afterwards, what happened. `inputs`: JSON text from which the decision
    can be repeated, empty where that is not possible (`scheduler.decisions.explain`)."""

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
