"""Records of requests for the live view: attempts, phases and outcome, but no content."""

from dataclasses import dataclass, field

from baton.core.cluster.placement import Placement
from baton.core.request import NO_SLO, LegTimeline, Slo

MAX_ATTEMPTS = 64
"""Attempts that are remembered of one request. Its samples may continue one by one, so there can be many."""


@dataclass(slots=True, kw_only=True)
class AttemptTrace:
    """One attempt. Times are event loop times; None if it did not come that far.

    rejected: message of the last rejection.
    lost_reason, lost_problem: why it failed.
    """

    number: int
    started_s: float
    placed_s: float | None = None
    placement: Placement | None = None
    rejected: str = ""
    lost_s: float | None = None
    lost_reason: str = ""
    lost_problem: str = ""


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """One request. Times are event loop times.

    seen_tokens: prompt tokens whose prefix this gateway had seen before, so that they could be cached.
    legs: (attempt, what a worker reported about it).
    outcome: `finished` or the reason of the failure; empty while the request is open.
    """

    request_id: str
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    received_s: float
    priority: int = 0
    slo: Slo = NO_SLO
    attempts: list[AttemptTrace] = field(default_factory=list)
    seen_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    tpot_s: float | None = None
    legs: tuple[tuple[int, LegTimeline], ...] = ()
    outcome: str = ""
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.received_s

    @property
    def placement(self) -> Placement | None:
        """The last placement of an attempt that is not lost."""
        return next(
            (each.placement for each in reversed(self.attempts) if each.placement and each.lost_s is None), None
        )

    @property
    def phase(self) -> str:
        """The outcome; of an open request `waiting` (for a placement), `prefill` or `decode`."""
        if self.outcome:
            return self.outcome
        if self.placement is None:
            return "waiting"
        return "prefill" if self.first_s is None else "decode"

    @property
    def meets_slo(self) -> bool | None:
        """True if the request completed and met its SLO. None if it has none or was cancelled."""
        if self.slo == NO_SLO or self.outcome == "cancelled":
            return None
        if self.outcome != "finished":
            return False
        terms = ((self.slo.ttft_s, self.ttft_s), (self.slo.tpot_s, self.tpot_s))
        return all(slo_s is None or actual_s is None or actual_s <= slo_s for slo_s, actual_s in terms)

    def attempt(self, number: int, now_s: float) -> AttemptTrace:
        """Return the last attempt with this number that is not lost; a new one if there is none."""
        for each in reversed(self.attempts):
            if each.number == number and each.lost_s is None:
                return each
        if len(self.attempts) >= MAX_ATTEMPTS:
            del self.attempts[1]
        self.attempts.append(AttemptTrace(number=number, started_s=now_s))
        return self.attempts[-1]
