"""The record of one placement decision."""

from dataclasses import dataclass, field
from enum import Enum

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


class MissingReason(Enum):
    """The reason why a part of a prompt is computed although it might have been cached.

    HELD_ELSEWHERE: another worker holds it, but computing is predicted to be faster than pulling it.
    DEMOTED: a worker, perhaps the chosen one, holds it in a slower tier than device memory, but computing is
        predicted to be faster than reloading or pulling it.
    EVICTED: the last worker that is known to have had it has evicted it.
    OTHER_TENANT, OTHER_MODEL, OTHER_SALT: equal first tokens are known for another tenant, model or cache
        salt, whose KV is never shared.
    NEVER_SEEN: nothing is known of it, or no longer.
    """

    HELD_ELSEWHERE = "held_elsewhere"
    DEMOTED = "demoted"
    EVICTED = "evicted"
    OTHER_TENANT = "other_tenant"
    OTHER_MODEL = "other_model"
    OTHER_SALT = "other_salt"
    NEVER_SEEN = "never_seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingPrefix:
    """The full blocks of a prompt that the placement does not reuse, and why.

    worker_id: the worker that holds or has evicted some of them; empty for other reasons.
    known_blocks: how many of them, from the first on.
    ago_s: time since the eviction.
    """

    num_blocks: int
    reason: MissingReason
    worker_id: str = ""
    known_blocks: int = 0
    ago_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """The place of a request in its client's session, as far as the scheduler has placed it.

    turn: counts from 1.
    gap_s: time from the end of the turn before to the arrival of this one; None if none has ended.
    median_gap_s: of the last gaps; None if there was none.
    attained_s: how long workers have computed for the turns that have ended.
    """

    turn: int
    gap_s: float | None = None
    median_gap_s: float | None = None
    attained_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """The decision about one attempt, its candidates, and the measured outcome.

    num_excluded: number of workers that were not chosen, by reason.
    session: None if the client named no session.
    missing: why blocks of the prompt are computed; None if all are reused, or the reason is unknown.
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
    missing: MissingPrefix | None = None
    session: SessionTurn | None = None

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
