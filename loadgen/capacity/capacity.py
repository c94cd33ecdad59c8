"""The search for the highest open-loop rate at which a share of all offered requests keeps its promise. Pure:
it says which rate to try next, is told what came of it, and says what is known. Others run the trials
(`loadgen.capacity.trials`).

First short trials look for the neighbourhood: the rate doubles until one breaks, or halves until one holds.
Then whole trials go on from there until at least one has held and one has broken, and from then on at rates
between which the capacity lies with 70 % (a bisection that does not take one noisy answer for the truth:
Waeber, Frazier and Henderson 2013), alternately at the lower and at the upper one, so that both sides of the
edge are measured again and again, minutes apart. It ends when the interval is as narrow as was asked for, or
when the trials are used up; then the interval is as wide as it is.

Several goals (promises at several scales, 90 % and 99 %) are several searches that are told of the same
trials.
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
"""From one whole trial to the next while all have come out on one side."""
QUANTILES = (0.15, 0.85)
MAX_SCOUTS = 24
MIN_TRIALS = 6
"""Whole trials: fewer say too little of how much they scatter."""


class State(StrEnum):
    SEARCHING = "searching"
    FOUND = "found"
    WIDE = "wide"
    """All trials are used up; the interval is wider than asked for."""
    ABOVE = "above"
    """The highest rate that may be tried still held."""
    BELOW = "below"
    """The lowest rate that may be tried already broke."""
    STOPPED = "stopped"
    """Ended from outside: by the user, by time, or because trials became invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a search may do, and how narrow it shall become: `high / low <= 1 + resolution`."""

    start_rps: float = 1.0
    min_rps: float = 0.01
    max_rps: float = math.inf
    resolution: float = 0.1
    max_trials: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A trial to be run. A scout is a short one."""

    rate_rps: float
    is_scout: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityEstimate:
    """What is known. `interval`: holds the capacity with the search's confidence; None before a whole trial
    has held and one has broken. `held_rps`, `broke_rps`: the highest rate of a trial that held and the lowest
    of one that broke, however surely. They may be in the wrong order: trials scatter."""

    state: State
    capacity_rps: float | None
    interval: Interval | None
    held_rps: float | None
    broke_rps: float | None
    num_trials: int
    num_scouts: int
    why: str = ""


class CapacitySearch:
    """`target`: the share, in (0, 1). `confidence` of the interval."""

    def __init__(self, target: float, limits: Limits, *, confidence: float = 0.95) -> None:
        self.target = target
        self.confidence = confidence
        self._limits = limits
        self._scouted: list[Observation] = []
        self._observed: list[Observation] = []
        self._located: ThresholdEstimate | None = None  # of all that were observed; None: not yet
        self._num_asked = 0
        self._state = State.SEARCHING
        self._why = ""

    @property
    def is_over(self) -> bool:
        return self._state is not State.SEARCHING

    def next(self) -> Proposal | None:
        """The trial to run now; None if the search is over. The same until it is told of one."""
        if self.is_over:
            return None
        return self._scout() or self._trial()

    def told(self, observation: Observation, *, is_scout: bool = False, is_own: bool = True) -> None:
        """Of a trial, asked for or not. `is_own`: it was this search that asked."""
        (self._scouted if is_scout else self._observed).append(observation)
        self._located = None
        self._num_asked += is_own and not is_scout
        if self.is_over or is_scout:
            return
        held, broke = self._sides(self._observed)
        if held and broke:
            found = self._threshold().interval(self.confidence)
            is_narrow = found.high is not None and found.high <= found.low * (1 + self._limits.resolution)
            if is_narrow and len(self._observed) >= MIN_TRIALS:
                self._end(State.FOUND)
        if not self.is_over and self._num_asked >= self._limits.max_trials:
            self._end(State.WIDE, f"after {self._num_asked} trials")

    def stop(self, why: str) -> None:
        """Nothing more can be tried."""
        if not self.is_over:
            self._end(State.STOPPED, why)

    @property
    def answer(self) -> CapacityEstimate:
        held, broke = self._sides(self._observed)
        is_located = bool(held and broke)
        return CapacityEstimate(
            state=self._state,
            capacity_rps=self._threshold().quantile(0.5) if is_located else None,
            interval=self._threshold().interval(self.confidence) if is_located else None,
            held_rps=max(held, default=None),
            broke_rps=min(broke, default=None),
            num_trials=len(self._observed),
            num_scouts=len(self._scouted),
            why=self._why,
        )

    # Inside.

    def _end(self, state: State, why: str = "") -> None:
        self._state, self._why = state, why

    def _threshold(self) -> ThresholdEstimate:
        if self._located is None:
            self._located = locate(self._observed, self.target)
        return self._located

    def _sides(self, observations: list[Observation]) -> tuple[list[float], list[float]]:
        """(rates that held, rates that broke)."""
        held = [o.rate_rps for o in observations if o.held(self.target)]
        return held, [o.rate_rps for o in observations if not o.held(self.target)]

    def _scout(self) -> Proposal | None:
        """None once the neighbourhood is known."""
        held, broke = self._sides([*self._scouted, *self._observed])
        if (held and broke) or self._observed or len(self._scouted) >= MAX_SCOUTS:
            return None
        if held:
            rate_rps = max(held) * SCOUT_FACTOR
            return None if rate_rps > self._limits.max_rps else self._proposal(rate_rps, is_scout=True)
        if broke:
            rate_rps = min(broke) / SCOUT_FACTOR
            return None if rate_rps < self._limits.min_rps else self._proposal(rate_rps, is_scout=True)
        return self._proposal(self._limits.start_rps, is_scout=True)

    def _trial(self) -> Proposal | None:
        held, broke = self._sides(self._observed)
        if held and broke:
            q = QUANTILES[len(self._observed) % len(QUANTILES)]
            rate_rps = self._threshold().quantile(q)
        elif held:
            rate_rps = max(held) * BRACKET_FACTOR
            if max(held) >= self._within(rate_rps):
                self._end(State.ABOVE)
                return None
        elif broke:
            rate_rps = min(broke) / BRACKET_FACTOR
            if min(broke) <= self._within(rate_rps):
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
        """The nearest rate of three digits, which one can say, that may be tried; where there is none, the
        limit itself."""
        limits = self._limits
        low, high = _rounded(limits.min_rps, ROUND_CEILING), _rounded(limits.max_rps, ROUND_FLOOR)
        if low > high:
            return limits.max_rps
        return min(max(_rounded(rate_rps, ROUND_HALF_EVEN), low), high)


def _rounded(rate_rps: float, way: str) -> float:
    """To three digits."""
    return float(Context(prec=3, rounding=way).create_decimal(repr(rate_rps)))
