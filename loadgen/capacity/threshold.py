"""Estimates the rate at which a share that falls with the rate crosses a target, from noisy trials.

Trials at one rate differ by much more than their number of requests suggests: a minute near the limit has one
bad stretch, or three, or none. On simulated servers the variance of a trial's share is 10 to 30 times the
binomial one, and little of it is visible within one trial. So the spread is estimated from the scatter of the
trials around one falling curve, and the interval of its crossing includes that spread:

    p(r) = (1 - lapse) * logistic(c - slope * ln(r / capacity))     c such that p(capacity) = target
    variance of a trial's share = effect * scatter * p (1 - p) / judged requests
    scatter = sqrt((1 - p) / (1 - target))
    D = 2 * sum judged / scatter * (share * ln(share / p) + (1 - share) * ln((1 - share) / (1 - p)))
    weight(capacity, slope, lapse) = prior * (N0 * E0 + D) ** (-(trials + N0) / 2)

D is the deviance; `effect` is integrated out. The prior of `effect` counts as N0 trials, so that a few trials
that happen to agree do not give a narrow interval. E0 falls with the target like the scatter (near 100 % bad
stretches are short) and with the size of a trial (a short one has no long stretches). The capacity's prior is
flat in its logarithm, from a little below to a little above the measured rates. The slope's prior is normal
in its logarithm around 8, within a factor of 2.2: a tenth more load lowers 90 % to about 80 %. `lapse` is a
share that misses its SLO at any rate; a trial with fewer misses is evidence against it.

Sources: quasi-likelihood for overdispersed counts, Wedderburn 1974; thresholds from such trials, Schütt,
Harmeling, Macke and Wichmann 2016. The coverage of the intervals is measured on simulated servers
(`bench.scenarios.control.capacity_coverage`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.measure.stats import Floats, Interval

N0 = 4.0
E0, E0_HALF_REQUESTS = 75.0, 250.0
"""E0 is the effect of infinitely long trials at a target of 90 %; at this trial size it is half of that."""
BEYOND = 1.5
"""The capacity may be outside of the measured rates by this factor; the search measures there next."""
OVERLOAD_ERROR = 0.02
"""Probability that a trial's backlog grew for another reason than overload."""
_SLOPES = np.geomspace(1.0, 50.0, 13)
_SLOPE, _SLOPE_FACTOR = 8.0, 0.8
_LAPSES = np.array([0.0, 0.3, 0.6, 0.85])
"""Fractions of 1 - target."""
_LAPSE_WEIGHTS = np.array([0.55, 0.2, 0.15, 0.1])
_NUM_RATES = 240
_NEGLIGIBLE = 1e-6
_SCATTER = (0.25, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Result of a trial: `num_good` of `num_judged` requests at `rate_rps` met their SLO.

    `is_overloaded` means that the backlog grew all the time, so the rate is above capacity even if the SLO
    was met.
    """

    rate_rps: float
    num_good: int
    num_judged: int
    is_overloaded: bool = False

    @property
    def share(self) -> float:
        """Share of good requests; 1 without requests."""
        return self.num_good / self.num_judged if self.num_judged else 1.0

    def met(self, target: float) -> bool:
        """True if the share of good requests reached the target, without a test of significance."""
        return self.share >= target and not self.is_overloaded


@dataclass(frozen=True, slots=True)
class ThresholdEstimate:
    """Probability distribution of a capacity: weights that sum to 1, for rates in ascending order."""

    rates: Floats
    weights: Floats

    def quantile(self, q: float) -> float:
        """Return the rate below which the capacity lies with probability `q`."""
        centres = np.cumsum(self.weights) - self.weights / 2
        return float(np.exp(np.interp(q, centres, np.log(self.rates))))

    def interval(self, confidence: float) -> Interval:
        """Return the central interval with this probability."""
        return Interval(low=self.quantile((1 - confidence) / 2), high=self.quantile((1 + confidence) / 2))


def locate(observations: Sequence[Observation], target: float) -> ThresholdEstimate:
    """Estimate the capacity at which the share is `target`, in (0, 1). Needs at least one observation."""
    rates = [observation.rate_rps for observation in observations]
    low, high = math.log(min(rates) / BEYOND), math.log(max(rates) * BEYOND)
    counted = [
        observation
        for observation in observations
        if observation.num_judged and not _is_misleading(observation, target)
    ]
    scatter = np.ones(len(counted))
    grid = found = np.zeros(0)
    for _ in range(2):  # first over the full range, then over the relevant part with the scatter of each fitted share
        grid = np.linspace(low, high, _NUM_RATES)
        found, shares = _fitted(grid, counted, target, scatter)
        for observation in observations:
            if observation.is_overloaded:
                found = np.where(grid < math.log(observation.rate_rps), found, found * OVERLOAD_ERROR)
        inside = np.flatnonzero(found > _NEGLIGIBLE * found.max())
        low, high = grid[max(inside[0] - 1, 0)], grid[min(inside[-1] + 1, grid.size - 1)]
        scatter = np.clip(np.sqrt((1 - shares) / (1 - target)), *_SCATTER)
    return ThresholdEstimate(np.exp(grid), found / found.sum())


def _fitted(grid: Floats, observations: Sequence[Observation], target: float, scatter: Floats) -> tuple[Floats, Floats]:
    """Return (weight of each logarithm of a capacity [grid], mean of p at each observation's rate)."""
    lapses = _LAPSES * (1 - target)
    at_capacity = target / (1 - lapses)
    c = np.log(at_capacity / (1 - at_capacity))
    total = np.full((grid.size, _SLOPES.size, lapses.size), N0 * _effect_before(observations, target))
    curves: list[Floats] = []
    for observation, more in zip(observations, scatter, strict=True):
        distance = math.log(observation.rate_rps) - grid
        curves.append((1 - lapses) / (1 + np.exp(np.clip(_SLOPES[:, None] * distance[:, None, None] - c, -60, 60))))
        total += _deviance(observation, curves[-1]) / more
    prior = np.log(_LAPSE_WEIGHTS) - ((np.log(_SLOPES / _SLOPE) / _SLOPE_FACTOR) ** 2 / 2)[:, None]
    logs = prior + _lapse_logs(observations, lapses) - (len(observations) + N0) / 2 * np.log(total)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    return weights.sum(axis=(1, 2)), np.array([float((weights * curve).sum()) for curve in curves])


def _effect_before(observations: Sequence[Observation], target: float) -> float:
    """Return the prior expectation of `effect`."""
    size = float(np.mean([observation.num_judged for observation in observations])) if observations else 0.0
    return max(1.0, E0 * size / (size + E0_HALF_REQUESTS) * math.sqrt((1 - target) / 0.1))


def _is_misleading(observation: Observation, target: float) -> bool:
    """True if the backlog grew but the SLO was still met: such a backlog causes misses later."""
    return observation.is_overloaded and observation.share >= target


def _lapse_logs(observations: Sequence[Observation], lapses: Floats) -> Floats:
    """Return log weights against each lapse from trials with fewer misses than it would cause, [lapses].

    Lapses are independent of each other, so `effect` is 1 here.
    """
    total = np.zeros_like(lapses)
    for observation in observations:
        total -= np.where(observation.share > 1 - lapses, _deviance(observation, 1 - lapses) / 2, 0.0)
    return total


def _deviance(observation: Observation, p: Floats) -> Floats:
    """Return the deviance of one trial. `p` is kept at least half a request away from 0 and 1."""
    share, num = observation.share, observation.num_judged
    p = np.clip(p, 0.5 / num, 1 - 0.5 / num)
    total = np.zeros_like(p)
    if share > 0:
        total += share * np.log(share / p)
    if share < 1:
        total += (1 - share) * np.log((1 - share) / (1 - p))
    return 2 * num * total
