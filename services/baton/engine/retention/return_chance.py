"""The chance that idle content is used again, from the pauses that were seen before.

Pauses are counted in bins of age whose width grows with age. For each bin the *hazard* is the share of what
was idle when the bin began that was used again before it ended. Content that is evicted, or whose owner is
forgotten, simply ends to count, so that evictions do not look like content that is never used again (life
tables, Cutler and Ederer, 1958).
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

FIRST_EDGE_S, EDGE_RATIO, NUM_BINS = 0.25, 1.5, 25
"""The first bin ends at `FIRST_EDGE_S`, each later one at `EDGE_RATIO` times the end of the bin before."""
EDGES_S = (0.0, *(FIRST_EDGE_S * EDGE_RATIO**index for index in range(NUM_BINS)))
"""Bin i is from `EDGES_S[i]` to `EDGES_S[i + 1]`. What is idle for longer than the last edge, 70 minutes, is
taken to be never used again."""
PRIOR_WEIGHT = 4.0
"""The initial hazard of a kind counts as so many pauses."""
SPREAD = (0.1, 0.2, 0.4, 0.2, 0.1)
"""Parts of an owner's own pause that count in the bins around its own."""
MAX_COUNTED = 1024.0
"""Pauses after which old ones count half."""


def bin_of(age_s: float) -> int:
    """Return the bin of an age; `NUM_BINS` if it is beyond all bins."""
    return bisect_right(EDGES_S, max(0.0, age_s)) - 1


class PauseCounts:
    """The pauses of all content of one kind, by bin. Old ones count less."""

    def __init__(self, initial_hazard: float) -> None:
        """initial_hazard: of each bin before a pause was seen"""
        self._initial = initial_hazard
        self._begun = [0.0] * NUM_BINS
        self._returned = [0.0] * NUM_BINS

    def begin(self, first: int, last: int) -> None:
        """Count content that was idle when these bins began, `last` included."""
        for index in range(first, min(last + 1, NUM_BINS)):
            self._begun[index] += 1
        if self._begun[0] > MAX_COUNTED:
            self._begun = [count / 2 for count in self._begun]
            self._returned = [count / 2 for count in self._returned]

    def end(self, index: int) -> None:
        """Count content that was used again in this bin, for which `begin` was called."""
        if index < NUM_BINS:
            self._returned[index] += 1

    def hazards(self) -> list[float]:
        """Return the hazard of each bin."""
        return [
            min(1.0, (returned + PRIOR_WEIGHT * self._initial) / (begun + PRIOR_WEIGHT))
            for begun, returned in zip(self._begun, self._returned, strict=True)
        ]


def with_own_pauses(hazards: Sequence[float], own: Sequence[tuple[int, float]], prior_weight: float) -> list[float]:
    """Return the hazards of one owner: its own pauses, and those of its kind as `prior_weight` pauses.

    own: bin and weight of each own pause. Each is spread over neighbouring bins, because a few pauses say
        little about single bins.
    """
    returned = [0.0] * (NUM_BINS + 1)
    for index, weight in own:
        for offset, part in enumerate(SPREAD, -(len(SPREAD) // 2)):
            returned[min(max(index + offset, 0), NUM_BINS)] += weight * part
    begun = list(accumulate(reversed(returned)))[::-1]  # a pause has begun all bins up to its own
    return [
        (returned[index] + prior_weight * hazard) / (begun[index] + prior_weight)
        for index, hazard in enumerate(hazards)
    ]


def return_rate(hazards: Sequence[float], age_s: float) -> float:
    """Return how likely content of this age is used again, per second for which it is kept.

    It may be kept until any later age and then be dropped, so the best such rate counts (Gittins index). Two
    contents with the same chance of return thus differ if one of them returns sooner. Within a bin the hazard
    is even, so what is left of a bin has a part of it.
    """
    best, chance, kept_s, left = 0.0, 0.0, 0.0, 1.0
    for index in range(bin_of(age_s), NUM_BINS):
        full_s = EDGES_S[index + 1] - EDGES_S[index]
        width_s = min(full_s, EDGES_S[index + 1] - age_s)
        returned = left * (1 - (1 - hazards[index]) ** (width_s / full_s))
        chance += returned
        kept_s += (left - returned / 2) * width_s
        left -= returned
        if chance > best * kept_s:
            best = chance / kept_s
    return best
