"""Predicts how long loads from a tier take: a fixed time and a time per block, from loads that have ended."""

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

_SIZE_SAMPLES = 7
"""Number of the newest loads of one size class that count."""
_MAX_AGE_S = 600.0
"""Older loads do not count, except those of the newest one's size class."""
_MIN_BLOCKS_SHARE = 1 / 16
"""Smallest share of its blocks in the time of the largest load. A larger one never seems to be free."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """A load, or loads that have overlapped: their blocks, and the time until the last of them ended."""

    ended_s: float
    num_blocks: int
    took_s: float


class LoadTimes:
    """Measures the loads of a tier. The caller passes the time.

    Loads that overlap count as one with all of their blocks. So a prediction for the blocks of the loads
    under way and of a new one is the time until all have ended.

    The line through the loads is robust: its slope is a median of the slopes between size classes, after
    Theil (1950) and Sen (1968), and its fixed time is the median of what loads take beyond their blocks. A
    load that waits for a step of the engine takes several times as long as others, and would make all
    predictions too long. Size classes are powers of two, so that many loads of one size do not displace those
    of other sizes.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[_Sample]] = {}  # by size class
        self._fixed_s, self._block_s = 0.0, 0.0
        self._late_s = 0.0
        self._num_running = 0
        self._began_s, self._num_blocks, self._is_complete = 0.0, 0, True

    @property
    def is_known(self) -> bool:
        """True after the first load."""
        return bool(self._samples)

    @property
    def fixed_s(self) -> float:
        """Time of a load beyond its blocks; 0 before the first."""
        return self._fixed_s

    @property
    def block_s(self) -> float | None:
        """Time that one more block adds to a load; None before the first."""
        return self._block_s if self.is_known else None

    def predicted_s(self, num_blocks: int) -> float | None:
        """Return the predicted time of loads without others before them; None before the first."""
        if not self.is_known:
            return None
        return max(self._late_s, self._fixed_s + num_blocks * self._block_s)

    def begin(self, now_s: float) -> None:
        """A load begins."""
        if not self._num_running:
            self._began_s, self._num_blocks, self._is_complete = now_s, 0, True
        self._num_running += 1

    def end(self, num_blocks: int, now_s: float, *, is_complete: bool, copy_block_s: float | None = None) -> None:
        """A load ends. It has loaded `num_blocks`.

        is_complete: False if it has not loaded all. Its time says nothing.
        copy_block_s: what a block is taken to need as long as all loads have been of one size
        """
        self._num_running -= 1
        self._num_blocks += num_blocks
        self._is_complete &= is_complete
        took_s = now_s - self._began_s
        if self._num_running or not self._is_complete or not self._num_blocks or took_s <= 0:
            return
        size = self._num_blocks.bit_length()
        samples = self._samples.setdefault(size, deque(maxlen=_SIZE_SAMPLES))
        samples.append(_Sample(now_s, self._num_blocks, took_s))
        for other in [each for each, known in self._samples.items() if known[-1].ended_s < now_s - _MAX_AGE_S]:
            del self._samples[other]
        self._fit(copy_block_s)

    def late(self, took_s: float) -> None:
        """A read has taken so long that its load did not wait for it. No load is predicted to be shorter."""
        self._late_s = max(self._late_s, took_s)

    def forget_late(self) -> None:
        """Predict loads without regard to late reads."""
        self._late_s = 0.0

    def forget(self) -> None:
        """Drop what was measured. Loads that run are counted when they end."""
        self._samples.clear()
        self._fixed_s = self._block_s = self._late_s = 0.0

    def _fit(self, copy_block_s: float | None) -> None:
        samples = [each for known in self._samples.values() for each in known]
        largest = max(samples, key=lambda each: each.num_blocks)
        least = _MIN_BLOCKS_SHARE * largest.took_s / largest.num_blocks
        proportional = statistics.median(each.took_s / each.num_blocks for each in samples)
        slope = _weighted_median(list(self._slopes()))
        if slope is None:
            slope = proportional if copy_block_s is None else min(copy_block_s, proportional)
        self._block_s = max(slope, least)
        beyond = (each.took_s - each.num_blocks * self._block_s for each in samples)
        self._fixed_s = max(0.0, statistics.median(beyond))

    def _slopes(self) -> Iterator[tuple[float, float]]:
        """Yield the slope between each two size classes, and its weight: the difference of their blocks."""
        classes = [
            (
                statistics.fmean(each.num_blocks for each in known),
                statistics.median(each.took_s for each in known),
            )
            for known in self._samples.values()
        ]
        for (a_blocks, a_s), (b_blocks, b_s) in combinations(classes, 2):
            yield (b_s - a_s) / (b_blocks - a_blocks), abs(b_blocks - a_blocks)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float | None:
    """Return the value with half of the weight below it; None without values.

    values: pairs with weights
    """
    left = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        left -= weight
        if left <= 0:
            return value
    return None
