"""Decides whether a trial met its SLO, missed it, or is undecided. It can be evaluated while the trial runs.

Judged are the requests due from the start of the steady window (`loadgen.measure.summary`: after the ramp) to
the last planned arrival. While a trial runs, a request in flight counts as good for the upper bound and as
bad for the lower one, unless it is already too old to become good. So an early verdict does not depend on
which responses arrived first.

The interval of the share is Wilson's for the effective number of requests. A trial is evaluated several
times, and each look uses a part of the error probability: O'Brien and Fleming's boundaries, spent as in Lan
and DeMets (1983), 2 - 2 Phi(z(error / 2) / sqrt(t)) for the t-th part of the trial. The parts add up by
Bonferroni, which holds for any dependence between looks. Early looks may only report a miss: while a queue
has not grown yet, any rate looks good.

The backlog is tested as well. The steady window is cut into eight parts. If requests in flight grew from part
to part by more than the parts differ (Student's t), and by a twentieth of all requests in total, the rate is
above capacity, even if responses are still in time. In a stable queue changes of neighbouring parts cancel,
so the test rarely errs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from loadgen.capacity.threshold import Observation
from loadgen.measure import request_metrics
from loadgen.measure.measures import Flags
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import OutcomeRules, RequestOutcome
from loadgen.measure.stats import Floats, Interval, effective_size, wilson
from loadgen.measure.summary import ramp_s
from loadgen.plan.plan import Plan, PlannedRequest
from loadgen.slo_target import SloScale, SloTarget

LOOKS = (0.25, 0.5, 0.75, 1.0)
"""Fractions of a trial after which it is evaluated. The last one is its end."""
MIN_EARLY_REQUESTS = 20
"""Fewest judged requests for an early verdict."""
EARLY_MISS_FACTOR = 2.0
"""An early verdict needs at least this many times the allowed misses.

A bad start near the limit is not enough, because the trial's final result is the measurement.
"""
PARTS = 8
"""Parts of the steady window in the backlog test."""
MIN_GROWTH = 0.05
_MIN_GROWTH_REQUESTS = 3


class TrialVerdict(StrEnum):
    """Result of a trial. The values are those of capacity.json."""

    MET = "held"
    MISSED = "broke"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Evaluation of a trial, complete or so far.

    - `num_open`: requests in flight that could still become good; not among those judged
    - `interval`: 95 % interval of the share, whatever happens to open requests
    - `growth_rps`: growth of the number of requests in flight, per second
    """

    num_good: int
    num_judged: int
    num_open: int
    interval: Interval
    growth_rps: float
    is_overloaded: bool
    verdict: TrialVerdict

    @property
    def share(self) -> float:
        """Share of good requests among those judged, or NaN."""
        return self.num_good / self.num_judged if self.num_judged else math.nan

    def observation(self, rate_rps: float) -> Observation:
        """Return the observation for the capacity estimate."""
        return Observation(
            rate_rps=rate_rps, num_good=self.num_good, num_judged=self.num_judged, is_overloaded=self.is_overloaded
        )


def look_errors(error: float, looks: Sequence[float] = LOOKS) -> tuple[float, ...]:
    """Return the error probability of each look; they sum to `error`.

    `looks` are fractions of the trial in ascending order; the last one is 1.
    """
    normal = NormalDist()
    z = normal.inv_cdf(1 - error / 2)
    spent = [2 - 2 * normal.cdf(z / math.sqrt(look)) for look in looks]
    return tuple(now - before for before, now in zip([0.0, *spent[:-1]], spent, strict=True))


@dataclass(frozen=True, slots=True)
class _Cohort:
    """Due requests in order of time: due and end times (infinite if not ended), and whether each is good.

    `is_open` means in flight and not too old to become good.
    """

    due_s: Floats
    ended_s: Floats
    is_good: Flags
    is_open: Flags


class TrialJudge:
    """Evaluates trials of one plan for one goal.

    `target` is the required share. `error` is the probability of reporting a miss for a trial that met its
    SLO.
    """

    def __init__(self, plan: Plan, rules: OutcomeRules, target: float, *, error: float = 0.025) -> None:
        self._plan = plan
        self._rules = rules
        self._target = target
        self._error = error
        times = [request.at_s for request in plan.requests if request.at_s is not None]
        self._first_s, self._last_s = min(times, default=0.0), max(times, default=0.0)
        self._session_s = session_s(plan)
        self._latest_good_s = max(
            (latest_good_s(self._slo_of(request), request.output_tokens) for request in plan.requests), default=0.0
        )

    @property
    def ends_s(self) -> float:
        """Time of the last planned arrival."""
        return self._last_s

    def judge(self, records: Sequence[Record], now_s: float = math.inf, *, look: int = len(LOOKS) - 1) -> Judgement:
        """Evaluate the trial at `now_s`, seconds from the start of the run.

        `records` are those of ended requests. With an infinite `now_s`, requests without a record never end.
        `look` is the index into `LOOKS`; only the last one may report that the SLO was met.
        """
        is_last = look == len(LOOKS) - 1
        error = look_errors(self._error)[look]
        cohort = self._cohort(records, now_s)
        start_s = self._first_s + self._ramp_s(records)
        end_s = min(self._last_s, now_s if is_last else now_s - self._min_age_s(records))
        rows = (cohort.due_s >= start_s) & (cohort.due_s <= end_s)
        good, is_open = cohort.is_good[rows], cohort.is_open[rows]
        filled_s = start_s if is_last else max(start_s, self._first_s + _oldest_s(cohort, now_s))
        growth, is_overloaded = _growth(cohort, filled_s, min(self._last_s, now_s), error)
        low = _bounds(good, error)[0]
        high = _bounds(good | is_open, error)[1]
        verdict = TrialVerdict.UNDECIDED
        bound = self._target if is_last else 1 - EARLY_MISS_FACTOR * (1 - self._target)
        if is_overloaded or (high < bound and (is_last or good.size >= MIN_EARLY_REQUESTS)):
            verdict = TrialVerdict.MISSED
        elif is_last and good.size and low >= self._target:
            verdict = TrialVerdict.MET
        return Judgement(
            num_good=int(good.sum()),
            num_judged=int(good.size - is_open.sum()),
            num_open=int(is_open.sum()),
            interval=Interval(low=_bounds(good, 0.025)[0], high=_bounds(good | is_open, 0.025)[1]),
            growth_rps=growth,
            is_overloaded=is_overloaded,
            verdict=verdict,
        )

    def _ramp_s(self, records: Sequence[Record]) -> float:
        """Return the ramp as in `loadgen.measure.summary`, or the session length if that is longer.

        Until then fewer sessions are active than later. It is at most half of the trial.
        """
        span_s = self._last_s - self._first_s
        e2e = [
            value
            for record in records
            if request_metrics.is_complete_response(record, self._rules)
            and (value := request_metrics.e2e_s(record)) is not None
        ]
        return max(ramp_s(np.array(e2e), span_s), min(self._session_s, span_s / 2))

    def _min_age_s(self, records: Sequence[Record]) -> float:
        """Return the age below which requests are not judged early, because most of them are still in
        flight."""
        ages = [record.ended_s - record.intended_s for record in records]
        return min(float(np.percentile(ages, 90)) if ages else math.inf, self._latest_good_s)

    def _slo_of(self, request: PlannedRequest) -> SloTarget:
        return self._rules.slos.get(request.slo_class) or self._rules.slos.get("default") or SloTarget()

    def _cohort(self, records: Sequence[Record], now_s: float) -> _Cohort:
        ended = {record.index: record for record in records}
        rows: list[tuple[float, float, bool, bool]] = []
        for request in self._plan.requests:
            record = ended.get(request.index)
            if record is not None:
                is_good = request_metrics.classify(record, self._rules) is RequestOutcome.GOOD
                rows.append((record.intended_s, record.ended_s, is_good, False))
                continue
            due_s = request.at_s
            if request.after is not None:
                before = ended.get(request.after)
                due_s = (
                    before.ended_s + request.think_s
                    if before is not None and request_metrics.is_complete_response(before, self._rules)
                    else None
                )
            if due_s is not None and due_s <= now_s:
                is_open = now_s < math.inf and now_s - due_s <= latest_good_s(
                    self._slo_of(request), request.output_tokens
                )
                rows.append((due_s, math.inf, False, is_open))
        rows.sort()
        columns = list(zip(*rows, strict=True)) or [()] * 4
        return _Cohort(
            *(np.array(column, kind) for column, kind in zip(columns, (float, float, bool, bool), strict=True))
        )


def scaled(slos: Mapping[str, SloTarget], scale: SloScale) -> dict[str, SloTarget]:
    """Return the SLOs with their bounds multiplied. Raises BadSlo if `scale` does not fit one of them."""
    return {name: scale.of(slo) for name, slo in slos.items()}


def latest_good_s(slo: SloTarget, output_tokens: int) -> float:
    """Return the age beyond which a response of `output_tokens` can no longer be good.

    It is infinite if the SLO has no bound for it.
    """
    by_tokens = math.inf
    if slo.ttft_s is not None and (slo.tpot_s is not None or output_tokens == 1):
        by_tokens = slo.ttft_s + (slo.tpot_s or 0.0) * (output_tokens - 1)
    return min(by_tokens, math.inf if slo.e2e_s is None else slo.e2e_s)


def student_tail(t: float, odd: int) -> float:
    """Return P(T > t) of Student's t with an odd number of degrees of freedom.

    Source: Abramowitz and Stegun 26.7.3.
    """
    angle = math.atan(t / math.sqrt(odd))
    term = total = math.cos(angle) if odd > 1 else 0.0
    for k in range(3, odd - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    return 0.5 - (angle + math.sin(angle) * total) / math.pi


def _bounds(good: Flags, error: float) -> tuple[float, float]:
    """Return lower and upper bound of the share, each wrong with probability `error`."""
    flags = good.astype(np.float64)
    effective = effective_size(flags)
    found = wilson(float(flags.mean()) * effective if flags.size else 0.0, effective, 1 - 2 * error)
    return found.low, 1.0 if found.high is None else found.high


def _oldest_s(cohort: _Cohort, now_s: float) -> float:
    """Return the age of the oldest request in flight.

    During at least this time after the start, the number in flight grows on any server.
    """
    in_flight = cohort.due_s[np.isinf(cohort.ended_s)]
    return now_s - float(in_flight[0]) if in_flight.size else 0.0


def _growth(cohort: _Cohort, start_s: float, end_s: float, error: float) -> tuple[float, bool]:
    """Return (growth of requests in flight per second, True if it is significant)."""
    if not end_s > start_s or not cohort.due_s.size:
        return 0.0, False
    edges = np.linspace(start_s, end_s, PARTS + 1)
    ended = np.sort(cohort.ended_s)
    in_flight = np.searchsorted(cohort.due_s, edges, side="right") - np.searchsorted(ended, edges, side="right")
    steps = np.diff(in_flight).astype(np.float64)
    grown, spread = float(steps.sum()), float(steps.std(ddof=1))
    num_due = int(((cohort.due_s >= start_s) & (cohort.due_s <= end_s)).sum())
    if grown < max(_MIN_GROWTH_REQUESTS, MIN_GROWTH * num_due):
        return grown / (end_s - start_s), False
    t = math.inf if spread == 0 else float(steps.mean()) / (spread / math.sqrt(PARTS))
    return grown / (end_s - start_s), student_tail(t, PARTS - 1) < error


def session_s(plan: Plan) -> float:
    """Return the 90th percentile of session lengths if responses take no time; 0 without later turns."""
    begins: dict[int, float] = {}
    lasts: dict[int, float] = {}
    first_of: dict[int, int] = {}
    for request in plan.requests:
        if request.after is None:
            first_of[request.index], begins[request.index] = request.index, 0.0
        else:
            first_of[request.index] = first_of[request.after]
            begins[request.index] = begins[request.after] + request.think_s
        lasts[first_of[request.index]] = begins[request.index]
    return float(np.percentile(list(lasts.values()), 90)) if lasts else 0.0
