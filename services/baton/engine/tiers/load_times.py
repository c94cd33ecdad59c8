"""Predicts how long loads from a tier take: a fixed time and a time per block, from loads that have ended."""

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

_CLASS_SAMPLES = 5
"""Number of the newest loads of one size class that are kept."""
_MAX_AGE_S = 600.0
"""Age at which a load is dropped."""
_NUM_OFF = 5
"""Number of successive loads that all are too slow, or all too fast, after which the speed has changed."""
_OFF_FACTOR = 2.0
"""A load is too slow or too fast if it differs by more than this factor from earlier ones of its size."""
_MIN_SIZE_RATIO = 2.0
"""The slope between two loads counts if their sizes differ by this factor. Otherwise it is noise."""
_MIN_SLOPE_SHARE = 1 / 16
"""Lower limit of the time per block, as a share of the time per block of the largest load. Without it, noise
could make more blocks free."""
_MAX_PERIOD_S = 1.0
"""Time after which loads that overlap without end are counted."""
LATE_S = 60.0
"""Time for which a load that was cut off limits predictions."""


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The predicted time of a load: `fixed_s`, and `block_s` for each block."""

    fixed_s: float
    block_s: float

    def of(self, num_blocks: int) -> float:
        """Return the time of a load."""
        return self.fixed_s + num_blocks * self.block_s


@dataclass(frozen=True, slots=True)
class _Sample:
    """A load, or loads that have overlapped: their blocks, and the time until the last of them ended."""

    ended_s: float
    num_blocks: int
    took_s: float


class LoadTimes:
    """Measures the loads of a tier. The caller passes the time.

    Loads that overlap count as one load with all of their blocks. A prediction for a new load must contain
    the blocks of the loads under way; it is then the time until all have ended.

    The times of loads lie near a line, but some are several times as long, because they wait for a step of
    the engine. So the line is robust: its slope is the median of the slopes between loads of different size,
    after Theil (1950) and Sen (1968), and its fixed time is the median of the rest. Loads are kept by size
    class, a power of two, so that many loads of one size do not displace those of other sizes.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[_Sample]] = {}  # by size class
        self._is_provisional = False
        self._off: deque[_Sample] = deque(maxlen=_NUM_OFF)
        self._block_s_before: dict[int, float] = {}  # by size class, before the loads of `_off`
        self._are_slow = False
        self._copy_block_s: float | None = None
        self._cost: LoadCost | None = None  # of the present samples; None if it is to be computed
        self._drop_at_s = inf
        self._late, self._late_until_s = LoadCost(0.0, 0.0), 0.0
        self._num_running = 0
        self._began_s, self._num_blocks, self._is_whole = 0.0, 0, True

    def cost(self, now_s: float) -> LoadCost | None:
        """Return what loads cost; None before the first, and if all are too old."""
        if now_s >= self._drop_at_s:
            self._drop_old(now_s)
        if self._cost is None and self._samples:
            self._cost = _fitted([each for known in self._samples.values() for each in known], self._copy_block_s)
        return self._cost

    def predicted_s(self, num_blocks: int, now_s: float) -> float | None:
        """Return the predicted time of loads without others before them; None if nothing is known."""
        cost, late_s = self.cost(now_s), self._late_s(num_blocks, now_s)
        if cost is None:
            return late_s or None
        return max(late_s, cost.of(num_blocks))

    def begin(self, now_s: float) -> None:
        """A load begins."""
        if not self._num_running:
            self._begin_period(now_s)
        self._num_running += 1

    def end(
        self, num_blocks: int, now_s: float, *, num_wanted: int, is_cut_off: bool = False, copy_block_s: float | None
    ) -> None:
        """A load ends. It has loaded `num_blocks` of `num_wanted` blocks.

        is_cut_off: it was not complete when its time was over. Other incomplete loads are not counted.
        copy_block_s: assumed time per block as long as all loads have been of about one size
        """
        self._num_running -= 1
        self._num_blocks += num_blocks
        self._is_whole &= num_blocks == num_wanted
        took_s = now_s - self._began_s
        if is_cut_off:
            self._limit(LoadCost(0.0, took_s / max(1, self._num_blocks)), now_s)
        if self._num_running and took_s < _MAX_PERIOD_S:
            return
        if self._is_whole and self._num_blocks and took_s > 0:
            self._copy_block_s = copy_block_s
            self._add(_Sample(now_s, self._num_blocks, took_s))
        self._begin_period(now_s)

    def observe(self, num_blocks: int, took_s: float, now_s: float) -> None:
        """Record a load that no other has overlapped."""
        self.begin(now_s - took_s)
        self.end(num_blocks, now_s, num_wanted=num_blocks, copy_block_s=None)

    def read_was_late(self, num_blocks: int, took_s: float, now_s: float) -> None:
        """A read has taken so long that its load did not wait for it: no load is predicted to be faster."""
        self._limit(LoadCost(took_s, took_s / num_blocks), now_s)

    def forget(self) -> None:
        """Drop what was measured. Loads that run are counted when they end."""
        self._samples.clear()
        self._off.clear()
        self._cost, self._late_until_s, self._is_provisional = None, 0.0, False

    def forget_with_the_next(self) -> None:
        """Drop what was measured when the next load is counted: this was no load as requests need them."""
        self._is_provisional = True

    def _begin_period(self, now_s: float) -> None:
        self._began_s, self._num_blocks, self._is_whole = now_s, 0, True

    def _add(self, sample: _Sample) -> None:
        if self._is_provisional:
            self.forget()
        if sample.took_s < self._late_s(sample.num_blocks, sample.ended_s):
            self._late_until_s = 0.0
        if self._speed_has_changed(sample):
            self._samples.clear()
            for each in self._off:
                self._keep(each)
            self._off.clear()
        else:
            self._keep(sample)
        self._cost = None
        self._drop_at_s = min(self._drop_at_s, sample.ended_s + _MAX_AGE_S)

    def _keep(self, sample: _Sample) -> None:
        size = sample.num_blocks.bit_length()
        self._samples.setdefault(size, deque(maxlen=_CLASS_SAMPLES)).append(sample)

    def _speed_has_changed(self, sample: _Sample) -> bool:
        """Return True if the last loads, this one included, all were too slow or all too fast.

        They are compared with loads of their size class before the first of them.
        """
        if not self._off:
            self._block_s_before = {
                size: statistics.median(each.took_s / each.num_blocks for each in known)
                for size, known in self._samples.items()
            }
        before_s = self._block_s_before.get(sample.num_blocks.bit_length())
        if before_s is None:
            return False
        ratio = sample.took_s / sample.num_blocks / before_s
        if 1 / _OFF_FACTOR <= ratio <= _OFF_FACTOR:
            self._off.clear()
            return False
        if (ratio > 1) != self._are_slow:
            self._off.clear()
        self._off.append(sample)
        self._are_slow = ratio > 1
        return len(self._off) == _NUM_OFF

    def _limit(self, late: LoadCost, now_s: float) -> None:
        if now_s >= self._late_until_s:
            self._late = LoadCost(0.0, 0.0)
        self._late = LoadCost(max(self._late.fixed_s, late.fixed_s), max(self._late.block_s, late.block_s))
        self._late_until_s = now_s + LATE_S

    def _late_s(self, num_blocks: int, now_s: float) -> float:
        """Return the least time of a load after others were cut off; 0 without such."""
        if now_s >= self._late_until_s:
            return 0.0
        return max(self._late.fixed_s, num_blocks * self._late.block_s)

    def _drop_old(self, now_s: float) -> None:
        """Drop old loads, and note when the next one will be old."""
        for size, samples in list(self._samples.items()):
            while samples and samples[0].ended_s + _MAX_AGE_S <= now_s:
                samples.popleft()
            if not samples:
                del self._samples[size]
        oldest_s = min((samples[0].ended_s for samples in self._samples.values()), default=inf)
        self._drop_at_s, self._cost = oldest_s + _MAX_AGE_S, None


def _fitted(samples: Sequence[_Sample], copy_block_s: float | None) -> LoadCost:
    """Return the line through samples. `copy_block_s`: slope if their sizes are too similar to tell it."""
    largest = max(samples, key=lambda each: each.num_blocks)
    proportional = statistics.median(each.took_s / each.num_blocks for each in samples)
    slope = _weighted_median(_slopes(samples))
    if slope is None:
        slope = proportional if copy_block_s is None else copy_block_s
    slope = min(max(slope, _MIN_SLOPE_SHARE * largest.took_s / largest.num_blocks), proportional)
    rest_s = statistics.median(each.took_s - each.num_blocks * slope for each in samples)
    return LoadCost(max(0.0, rest_s), slope)


def _slopes(samples: Sequence[_Sample]) -> Iterable[tuple[float, float]]:
    """Yield the slope between each two samples of different size, and its weight: how much they differ."""
    ordered = sorted(samples, key=lambda each: each.num_blocks)
    for small, large in combinations(ordered, 2):
        if large.num_blocks >= _MIN_SIZE_RATIO * small.num_blocks:
            num_more = large.num_blocks - small.num_blocks
            yield (large.took_s - small.took_s) / num_more, num_more


def _weighted_median(values: Iterable[tuple[float, float]]) -> float | None:
    """Return the value with half of the weight below it; None without values.

    values: pairs with weights
    """
    ordered = sorted(values)
    left = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return None
