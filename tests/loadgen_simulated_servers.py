"""Simulated servers, and capacity searches on them in virtual time without a server, clock or socket.

`python -m bench.scenarios.control.capacity_coverage` measures with them how often intervals contain the
truth.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from loadgen.capacity.capacity_search import CapacityEstimate, CapacitySearch, Limits
from loadgen.capacity.trials import SCOUT_PART, SCOUT_REQUESTS, TrialLength
from loadgen.capacity.verdicts import LOOKS, Judgement, TrialJudge, TrialVerdict
from loadgen.measure.records import Arrival, Record
from loadgen.measure.request_metrics import OutcomeRules
from loadgen.plan import draws
from loadgen.plan.arrivals import arrivals, parse_gaps, steady
from loadgen.plan.plan import Generated, Plan, PlannedRequest
from loadgen.plan.sources.workloads import DEFAULT_VOCABULARY
from loadgen.slo_target import SloTarget

OUTPUT_TOKENS = 8
Serve = Callable[[Plan, random.Random], list[Record]]


def plan_at(rate_rps: float, seconds: float, seed: int, *, gaps: str = "poisson", slo: str = "ttft=500ms") -> Plan:
    times = arrivals(draws.stream(seed, "arrivals"), parse_gaps(gaps), steady(rate_rps), until_s=seconds)
    prompt = (Generated(segment_id=0, num_tokens=8),)
    requests = (
        PlannedRequest(index=index, segments=prompt, output_tokens=OUTPUT_TOKENS, at_s=at_s)
        for index, at_s in enumerate(times.tolist())
    )
    return Plan(
        name="queue",
        seed=seed,
        vocabulary=DEFAULT_VOCABULARY,
        requests=tuple(requests),
        slos={"default": SloTarget.parse(slo)},
    )


def complete_record(request: PlannedRequest, first_s: float, last_s: float) -> Record:
    """Return a complete response with its first token at `first_s` and all others at `last_s`."""
    assert request.at_s is not None
    return Record(
        index=request.index,
        intended_s=request.at_s,
        sent_s=request.at_s,
        ended_s=last_s,
        planned_prompt_tokens=8,
        planned_output_tokens=request.output_tokens,
        arrivals=(Arrival(at_s=first_s, num_tokens=1), Arrival(at_s=last_s, num_tokens=request.output_tokens - 1)),
        status=200,
        finish_reason="length",
        is_complete=True,
        num_output_tokens=request.output_tokens,
    )


def _lognormal(rng: random.Random, mean: float, cv: float) -> float:
    variance = math.log1p(cv * cv)
    return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)) if cv else mean


def serial_prefill(mean_s: float, cv: float, late_share: float = 0.0) -> Serve:
    """Return a prefill worker that serves one request after the other.

    `late_share` is the share of responses that are 9 s late at any load.
    """

    def serve(plan: Plan, rng: random.Random) -> list[Record]:
        free_s, records = 0.0, []
        for request in plan.requests:
            free_s = max(request.at_s or 0.0, free_s) + _lognormal(rng, mean_s, cv)
            first_s = free_s + 9.0 * (rng.random() < late_share)
            records.append(complete_record(request, first_s, first_s + 0.2))
        return records

    return serve


def slots(count: int, mean_s: float, cv: float = 0.0) -> Serve:
    """Return a server with a number of slots. Requests without a free slot wait in a queue."""

    def serve(plan: Plan, rng: random.Random) -> list[Record]:
        free, records = [0.0] * count, []
        for request in plan.requests:
            start_s = max(request.at_s or 0.0, free[0])
            end_s = start_s + _lognormal(rng, mean_s, cv)
            heapq.heapreplace(free, end_s)
            records.append(complete_record(request, start_s + 0.01, end_s))
        return records

    return serve


def batched_decode(step_s: float = 0.01, more_s: float = 0.001, steps: int = 64) -> Serve:
    """Return a decode worker whose steps take longer the more responses are active."""

    def serve(plan: Plan, rng: random.Random) -> list[Record]:
        ends: list[float] = []
        records = []
        for request in plan.requests:
            at_s = request.at_s or 0.0
            while ends and ends[0] <= at_s:
                heapq.heappop(ends)
            tpot_s = step_s + more_s * len(ends)
            heapq.heappush(ends, at_s + tpot_s * steps)
            records.append(complete_record(request, at_s + tpot_s * (steps - OUTPUT_TOKENS + 1), at_s + tpot_s * steps))
        return records

    return serve


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A server with its load and its SLO.

    `capacity_rps` is the rate at which 90 % meet the SLO on average over 60 s trials (`true_capacity`).
    """

    serve: Serve
    slo: str
    gaps: str = "poisson"
    start_rps: float = 1.0
    capacity_rps: float = math.nan


SYSTEMS = {
    "prefill worker": System(serve=serial_prefill(0.08, 0.8), slo="ttft=500ms", start_rps=2.0, capacity_rps=8.70),
    "long-tailed prefill": System(serve=serial_prefill(0.08, 2.0), slo="ttft=500ms", capacity_rps=4.98),
    "5 % late at any load": System(
        serve=serial_prefill(0.08, 0.8, late_share=0.05), slo="ttft=500ms", capacity_rps=7.57
    ),
    "8 slots": System(serve=slots(8, 1.0), slo="ttft=510ms", capacity_rps=6.38),
    "8 slots, bursts": System(serve=slots(8, 1.0), slo="ttft=510ms", gaps="gamma:cv=3", capacity_rps=1.33),
    "16 slots, long answers": System(serve=slots(16, 4.0, 0.7), slo="ttft=1s", capacity_rps=3.20),
    "decode worker": System(serve=batched_decode(), slo="tpot=30ms", start_rps=2.0, capacity_rps=9.21),
}


def trial(
    system: System, rate_rps: float, seconds: float, seed: int, *, target: float = 0.9, looks: bool = True
) -> tuple[Judgement, float]:
    """Return a trial's judgement and duration. It is evaluated while it runs, like `TrialWatch` does."""
    plan = plan_at(rate_rps, seconds, seed, gaps=system.gaps, slo=system.slo)
    records = system.serve(plan, random.Random(seed))
    judge = TrialJudge(plan, OutcomeRules(slos=plan.slos), target)
    for look, part in enumerate(LOOKS[:-1] if looks else ()):
        now_s = part * seconds
        judgement = judge.judge([record for record in records if record.ended_s <= now_s], now_s, look=look)
        if judgement.verdict is TrialVerdict.MISSED:
            return judgement, now_s
    return judge.judge(records), seconds


def search(
    system: System, seconds: float, seed: int, *, target: float = 0.9, limits: Limits | None = None
) -> tuple[CapacityEstimate, float]:
    """Return the estimate and the total seconds of all trials."""
    start_rps = system.start_rps * (1.0, 1.37)[seed % 2]
    search = CapacitySearch(
        target, limits or Limits(start_rps=start_rps, min_rps=TrialLength(seconds=seconds).min_rps(target))
    )
    number, took_s = 0, 0.0
    while (proposal := search.next()) is not None:
        time_s = seconds
        if proposal.is_scout:
            time_s = min(seconds, max(seconds * SCOUT_PART, SCOUT_REQUESTS / proposal.rate_rps))
        judgement = None
        while judgement is None or not judgement.num_judged:  # a plan may have no arrivals
            number += 1
            judgement, lasted_s = trial(
                system, proposal.rate_rps, time_s, zlib.crc32(f"{seed} {number}".encode()), target=target
            )
            took_s += lasted_s
        search.observe(judgement.observation(proposal.rate_rps), is_scout=proposal.is_scout)
    return search.answer, took_s


def true_capacity(system: System, seconds: float, target: float = 0.9, trials: int = 150) -> float:
    """Return the rate at which the mean share of trials is `target`, to about one percent."""

    def share(rate_rps: float, count: int) -> float:
        found = (trial(system, rate_rps, seconds, 10**6 + seed, target=target, looks=False)[0] for seed in range(count))
        return fmean(judgement.share for judgement in found if judgement.num_judged)

    low, high = 0.2, 50.0
    for step in range(14):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if share(middle, 10 if step < 6 else trials) >= target else (low, middle)
        if step == 5:
            low, high = low / 1.2, high * 1.2
    return math.sqrt(low * high)
