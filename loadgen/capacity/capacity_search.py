"""Search for the highest open-loop rate at which a given share of all offered requests meets its SLO.

It proposes the next rate to try, takes the observation, and estimates the capacity. `loadgen.capacity.trials`
runs the trials.

Short scout trials find the neighbourhood: the rate doubles until the SLO is missed, or halves until it is
met. Full-length trials continue from there until the SLO was met once and missed once. From then on the rates
are chosen so that the capacity lies between them with 70 % probability (a bisection that does not take one
noisy result for the truth: Waeber, Frazier and Henderson 2013), alternately the lower and the upper one. So
both sides of the capacity are measured repeatedly, minutes apart. The search ends when the interval is as
narrow as requested or the trials are used up.

Several goals (SLO scales, shares such as 90 % and 99 %) are separate searches that share their trials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from enum import StrEnum

from loadgen.capacity.threshold import Observation, ThresholdEstimate, locate
from loadgen.measure.stats import Interval

SCOUT_FACTOR = 2.0
BRACKET_FACTOR = 1.3
"""Factor between full-length trials while all had the same result."""
QUANTILES = (0.15, 0.85)
"""Quantiles of the estimated capacity at which trials are run."""
MAX_SCOUTS = 24
MIN_TRIALS = 6
"""Fewest full-length trials; fewer say too little about their scatter."""


class State(StrEnum):
    """State of a search."""

    SEARCHING = "searching"
    FOUND = "found"
    WIDE = "wide"
    """All trials are used up and the interval is wider than requested."""
    ABOVE = "above"
    """The SLO was met at the highest allowed rate."""
    BELOW = "below"
    """The SLO was missed at the lowest allowed rate."""
    STOPPED = "stopped"
    """Ended from outside: by the user, by time, or because of invalid trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a search. It ends when `high / low <= 1 + resolution`."""

    start_rps: float = 1.0
    min_rps: float = 0.01
    max_rps: float = math.inf
    resolution: float = 0.1
    max_trials: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A trial to run. A scout is a short one."""

    rate_rps: float
    is_scout: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityEstimate:
    """Result of a search so far.

    - `interval`: contains the capacity with the search's confidence; None before the SLO was both met and
      missed
    - `held_rps`: highest rate of a trial that met the SLO, however certainly
    - `broke_rps`: lowest rate of a trial that missed it; may be below `held_rps`, because trials scatter
    - `why`: reason for the end
    """

    state: State
    capacity_rps: float | None
    interval: Interval | None
    held_rps: float | None
    broke_rps: float | None
    num_trials: int
    num_scouts: int
    why: str = ""


class CapacitySearch:
    """Search for one goal. `target` is the share in (0, 1); `confidence` is that of the interval."""

    def __init__(self, target: float, limits: Limits, *, confidence: float = 0.95) -> None:
        self.target = target
        self.confidence = confidence
        self._limits = limits
        self._scouted: list[Observation] = []
        self._observed: list[Observation] = []
        self._located: ThresholdEstimate | None = None  # from all observations; None if outdated
        self._num_asked = 0
        self._state = State.SEARCHING
        self._why = ""

    @property
    def is_over(self) -> bool:
        """True once no more trials are needed."""
        return self._state is not State.SEARCHING

    def next(self) -> Proposal | None:
        """Return the trial to run now, or None if the search is over. It is the same until an observation is
        added."""
        if self.is_over:
            return None
        return self._scout() or self._trial()

    def observe(self, observation: Observation, *, is_scout: bool = False, is_own: bool = True) -> None:
        """Add a trial's observation, requested or not. `is_own` is true if this search requested it."""
        (self._scouted if is_scout else self._observed).append(observation)
        self._located = None
        self._num_asked += is_own and not is_scout
        if self.is_over or is_scout:
            return
        met, missed = self._sides(self._observed)
        if met and missed:
            found = self._threshold().interval(self.confidence)
            is_narrow = found.high is not None and found.high <= found.low * (1 + self._limits.resolution)
            if is_narrow and len(self._observed) >= MIN_TRIALS:
                self._end(State.FOUND)
        if not self.is_over and self._num_asked >= self._limits.max_trials:
            self._end(State.WIDE, f"after {self._num_asked} trials")

    def stop(self, why: str) -> None:
        """End the search, because no more trials can be run."""
        if not self.is_over:
            self._end(State.STOPPED, why)

    @property
    def answer(self) -> CapacityEstimate:
        """The current estimate."""
        met, missed = self._sides(self._observed)
        is_located = bool(met and missed)
        return CapacityEstimate(
            state=self._state,
            capacity_rps=self._threshold().quantile(0.5) if is_located else None,
            interval=self._threshold().interval(self.confidence) if is_located else None,
            held_rps=max(met, default=None),
            broke_rps=min(missed, default=None),
            num_trials=len(self._observed),
            num_scouts=len(self._scouted),
            why=self._why,
        )

    # Internals.

    def _end(self, state: State, why: str = "") -> None:
        self._state, self._why = state, why

    def _threshold(self) -> ThresholdEstimate:
        if self._located is None:
            self._located = locate(self._observed, self.target)
        return self._located

    def _sides(self, observations: list[Observation]) -> tuple[list[float], list[float]]:
        """Return (rates that met the SLO, rates that missed it)."""
        met = [o.rate_rps for o in observations if o.met(self.target)]
        return met, [o.rate_rps for o in observations if not o.met(self.target)]

    def _scout(self) -> Proposal | None:
        """Return the next scout trial, or None once the neighbourhood is known."""
        met, missed = self._sides([*self._scouted, *self._observed])
        if (met and missed) or self._observed or len(self._scouted) >= MAX_SCOUTS:
            return None
        if met:
            rate_rps = max(met) * SCOUT_FACTOR
            return None if rate_rps > self._limits.max_rps else self._proposal(rate_rps, is_scout=True)
        if missed:
            rate_rps = min(missed) / SCOUT_FACTOR
            return None if rate_rps < self._limits.min_rps else self._proposal(rate_rps, is_scout=True)
        return self._proposal(self._limits.start_rps, is_scout=True)

    def _trial(self) -> Proposal | None:
        met, missed = self._sides(self._observed)
        if met and missed:
            q = QUANTILES[len(self._observed) % len(QUANTILES)]
            rate_rps = self._threshold().quantile(q)
        elif met:
            rate_rps = max(met) * BRACKET_FACTOR
            if max(met) >= self._within(rate_rps):
                self._end(State.ABOVE)
                return None
        elif missed:
            rate_rps = min(missed) / BRACKET_FACTOR
            if min(missed) <= self._within(rate_rps):
                self._end(State.BELOW)
                return None
        else:
            scouted = self._sides(self._scouted)
            rate_rps = (
                max(scouted[0]) * math.sqrt(SCOUT_FACTOR)
                if all(scouted)
                else max(scouted[0])
                if scouted[0]
                else min(scouted[1])
            )
        return self._proposal(rate_rps, is_scout=False)

    def _proposal(self, rate_rps: float, *, is_scout: bool) -> Proposal:
        return Proposal(rate_rps=self._within(rate_rps), is_scout=is_scout)

    def _within(self, rate_rps: float) -> float:
        """Return the nearest allowed rate of three digits, or the limit itself if there is none."""
        limits = self._limits
        low, high = _rounded(limits.min_rps, ROUND_CEILING), _rounded(limits.max_rps, ROUND_FLOOR)
        if low > high:
            return limits.max_rps
        return min(max(_rounded(rate_rps, ROUND_HALF_EVEN), low), high)


def _rounded(rate_rps: float, rounding: str) -> float:
    """Round to three significant digits."""
    return float(Context(prec=3, rounding=rounding).create_decimal(repr(rate_rps)))
