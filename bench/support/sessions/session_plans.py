"""Plans of sessions whose clients pause differently, and the working set of a plan."""

import math
from dataclasses import replace

from loadgen.plan import draws
from loadgen.plan.arrivals import poisson
from loadgen.plan.cache_model import in_planned_order
from loadgen.plan.lengths import Fixed, Lognormal
from loadgen.plan.plan import Plan, PlannedRequest, Vocabulary
from loadgen.plan.sources.workloads import SessionShape, sessions

MEDIAN_PAUSE_S, SPREAD = 5.0, 1.2
"""Pauses are lognormal: 5 s at the median and 81 s at the 99th percentile."""
BETWEEN_SHARE = 0.3
"""Share of the variance of their logarithm that is between sessions. It is 0.29 in 60 public sessions of
coding agents (kv-cache-tester)."""
VOCABULARY = Vocabulary(low=1, high=250)
MAX_CONTEXT = 960


def session_plan(*, rate_rps: float, seconds: float, seed: int) -> Plan:
    """Return a plan of sessions that arrive at a rate, with 12 turns on average.

    A prompt has 256 tokens in the first turn and 32 more in each later one, on average.
    """
    times_s = poisson(draws.stream(seed, "arrivals"), rate_rps=rate_rps, until_s=seconds)
    within = SPREAD * math.sqrt(1 - BETWEEN_SHARE)
    shape = SessionShape(
        count=Lognormal(mean=12.0, cv=0.7, low=1.0, high=40.0),
        think=Lognormal(mean=MEDIAN_PAUSE_S * math.exp(within**2 / 2), cv=math.sqrt(math.expm1(within**2))),
        first_inputs=Lognormal(mean=256.0, cv=0.4, low=64.0, high=600.0),
        later_inputs=Lognormal(mean=32.0, cv=0.5, low=4.0, high=128.0),
        outputs=Fixed(8),
        max_context=MAX_CONTEXT,
    )
    factors = draws.normal(draws.stream(seed, "factors"), len(times_s)) * SPREAD * math.sqrt(BETWEEN_SHARE)
    requests = [
        replace(request, think_s=request.think_s * math.exp(factors[int(request.session[1:])]))
        for request in sessions(times_s, shape, seed=seed)
    ]
    return Plan(name="sessions", seed=seed, vocabulary=VOCABULARY, requests=tuple(requests))


def planned_times_s(plan: Plan) -> list[float]:
    """Return the time of each request, by index, as if responses took no time."""
    times_s: list[float] = []
    for request in plan.requests:
        times_s.append(request.at_s or 0.0 if request.after is None else times_s[request.after] + request.think_s)
    return times_s


def working_set_tokens(plan: Plan, from_s: float, until_s: float) -> float:
    """Return the mean number of tokens of the sessions that go on, over a span of the plan."""
    times_s, follows = planned_times_s(plan), {r.after: r for r in plan.requests if r.after is not None}
    token_s = 0.0
    for request in in_planned_order(plan):
        following: PlannedRequest | None = follows.get(request.index)
        if following is not None:
            begin_s, end_s = max(from_s, times_s[request.index]), min(until_s, times_s[following.index])
            tokens = (plan.num_prompt_tokens(request) or 0) + request.output_tokens
            token_s += tokens * max(0.0, end_s - begin_s)
    return token_s / (until_s - from_s)
