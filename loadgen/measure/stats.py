"""Percentiles and confidence intervals. Every random draw comes from a seed.

Consecutive requests share a queue, so they are not independent. Intervals that ignore this are too narrow,
most of all near a server's limit. All intervals here resample *blocks* of consecutive requests, whose length
follows from the data's autocorrelation (`block_length`). They describe other requests of the same run. They
do not describe another run on another day: repeat the run for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

RESAMPLES = 1000
MATRIX = 500_000
"""Most draws held in memory at a time."""
MAX_BLOCKS = 2000
"""More blocks than this are merged, which bounds a resampling at `RESAMPLES * MAX_BLOCKS` draws."""
MAX_DRAWS = 20_000_000
"""Most draws of one resampling of percentiles, which must be sorted. Larger data gets fewer resamples, at
least 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A confidence interval. `high` is None if the data has no upper bound, such as a p99 of forty values."""

    low: float
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        """True if zero is outside of the interval."""
        return self.low > 0 or (self.high is not None and self.high < 0)


def percentile(values: ArrayLike, q: float) -> float:
    """Return the q-th percentile, q in [0, 100], or NaN without values.

    Interpolates linearly between the nearest ranks, rank = q / 100 * (n - 1), like numpy, vLLM, AIPerf and
    inference-perf.
    """
    return percentiles(values, (q,))[0]


def percentiles(values: ArrayLike, qs: Sequence[float]) -> list[float]:
    """Return several percentiles with one sort."""
    sample = np.asarray(values, dtype=np.float64)
    return [float(found) for found in np.percentile(sample, list(qs))] if sample.size else [math.nan] * len(qs)


def wilson(successes: float, total: float, confidence: float = 0.95) -> Interval:
    """Return Wilson's score interval of a share.

    Unlike the normal approximation it stays in [0, 1] and is correct at 0 and 1. `total` may be an effective
    number (`effective_size`) with `successes` scaled accordingly. Returns [0, 1] without trials. Source:
    Wilson 1927; Brown, Cai, DasGupta 2001.
    """
    if total <= 0:
        return Interval(low=0.0, high=1.0)
    z = _z(confidence)
    share = successes / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return Interval(
        low=0.0 if successes <= 0 else max(0.0, centre - half),
        high=1.0 if successes >= total else min(1.0, centre + half),
    )


def share_interval(successes: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return Wilson's interval of the share of true values, for the effective number of requests.

    `successes` are booleans in the order of intended times.
    """
    flags = np.asarray(successes, dtype=np.float64)
    effective = effective_size(flags)
    return wilson(float(flags.mean()) * effective if flags.size else 0.0, effective, confidence)


def mean_interval(
    values: ArrayLike, *, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Interval | None:
    """Return the block bootstrap interval of the mean, or None for fewer than two values.

    `values` are in the order of intended times.
    """
    sample = np.asarray(values, dtype=np.float64)
    return ratio_interval(sample, np.ones_like(sample), confidence=confidence, seed=seed, resamples=resamples)


def ratio_interval(
    numerators: ArrayLike,
    denominators: ArrayLike,
    *,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Return the block bootstrap interval of sum(numerators) / sum(denominators).

    Each request has one of both. Returns None for fewer than two requests or a zero denominator.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    drawn = _ratios(above, below, np.random.default_rng(seed), resamples)
    if drawn is None:
        return None
    low, high = np.percentile(drawn, _tails(confidence))
    return Interval(low=float(low), high=float(high))


def percentile_interval(
    values: ArrayLike,
    q: float,
    *,
    owners: ArrayLike | None = None,
    num_owners: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Return the interval of the q-th percentile, or None for fewer than two values.

    The share of values at or below the percentile is bootstrapped, and its interval is read off the sorted
    values. That needs one sort only. `owners[i]` in [0, num_owners) is the request of `values[i]`; whole
    requests are drawn, because the gaps of one response are alike. Without owners each value is one request,
    in the order of intended times. If the share's interval reaches 1, there is no upper bound. Source:
    Woodruff 1952, with a block bootstrap instead of normal theory.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.size < 2:
        return None
    at = float(np.percentile(sample, q))
    below = (sample <= at).astype(np.float64)
    weights = np.ones_like(below)
    if owners is not None:
        index = np.asarray(owners, dtype=np.intp)
        size = int(num_owners if num_owners is not None else index.max() + 1)
        below = np.bincount(index, below, size).astype(np.float64)
        weights = np.bincount(index, weights, size).astype(np.float64)
    drawn = _ratios(below, weights, np.random.default_rng(seed), resamples)
    if drawn is None:
        return None
    shares = q / 100 + np.percentile(drawn, _tails(confidence)) - below.sum() / weights.sum()
    ordered = np.sort(sample)
    low = _at_share(ordered, max(0.0, float(shares[0])))
    return Interval(low=min(low, at), high=max(_at_share(ordered, float(shares[1])), at) if shares[1] < 1 else None)


def difference_interval(
    before: ArrayLike,
    after: ArrayLike,
    *,
    q: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Return the paired block bootstrap interval of after - before, for means or q-th percentiles.

    Request i of both runs is drawn together, so effects of the plan (a long prompt, a burst) cancel. Returns
    None for fewer than two pairs.
    """
    old, new = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if q is None:
        return mean_interval(new - old, confidence=confidence, seed=seed, resamples=resamples)
    if old.size < 2:
        return None
    length = max(block_length(_below(old, q)), block_length(_below(new, q)))
    drawn = [
        np.percentile(new[rows], q, axis=1) - np.percentile(old[rows], q, axis=1)
        for rows in _draws(old.size, length, resamples, np.random.default_rng(seed))
    ]
    return _interval(np.concatenate(drawn), confidence)


def independent_difference_interval(
    before: ArrayLike,
    after: ArrayLike,
    *,
    q: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Return the interval of after - before for two independent samples. None if either has fewer than two
    values."""
    rng = np.random.default_rng(seed)
    sides: list[Floats] = []
    for values in (before, after):
        sample = np.asarray(values, dtype=np.float64)
        if sample.size < 2:
            return None
        if q is None:
            means = _ratios(sample, np.ones_like(sample), rng, resamples)
            assert means is not None
            sides.append(means)
            continue
        draws = _draws(sample.size, block_length(_below(sample, q)), resamples, rng)
        sides.append(np.concatenate([np.percentile(sample[rows], q, axis=1) for rows in draws]))
    count = min(side.size for side in sides)
    return _interval(sides[1][:count] - sides[0][:count], confidence)


def effective_size(values: ArrayLike) -> float:
    """Return the number of independent values with the same information on the mean.

    It is n * variance / long-run variance, between 1 and n.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.size < 2:
        return float(sample.size)
    covariances, memory = _memory(sample)
    if covariances[0] <= 0:
        return float(sample.size)
    long_run = _long_run(covariances, memory)
    return float(np.clip(sample.size * covariances[0] / long_run if long_run > 0 else sample.size, 1.0, sample.size))


def block_length(values: ArrayLike) -> int:
    """Return the number of consecutive values to draw together, between 1 and a third of all values.

    Source: Politis and White 2004, with the correction of Patton, Politis and White 2009, for the circular
    block bootstrap.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.size < 9:
        return 1
    covariances, memory = _memory(sample)
    spread = _long_run(covariances, memory)
    if covariances[0] <= 0 or spread <= 0:
        return 1
    lags = np.arange(1, memory + 1)
    curvature = 2 * float(np.sum(_flat_top(lags / memory) * lags * covariances[1 : memory + 1]))
    length = (2 * curvature**2 / (4 / 3 * spread**2)) ** (1 / 3) * sample.size ** (1 / 3)
    return int(np.clip(math.ceil(length), 1, sample.size // 3))


def _ratios(above: Floats, below: Floats, rng: np.random.Generator, resamples: int) -> Floats | None:
    """Return `resamples` draws of sum(above) / sum(below) over circular blocks."""
    size, total = above.size, float(below.sum())
    if size < 2 or total == 0:
        return None
    residuals = above - above.sum() / total * below  # first-order influence on the ratio
    length = max(block_length(residuals), -(-size // MAX_BLOCKS))
    count = -(-size // length)
    starts = rng.integers(0, size, (resamples, count))
    sums = [_block_sums(side, length)[starts].sum(axis=1) for side in (above, below)]
    drawn: Floats = sums[0][sums[1] != 0] / sums[1][sums[1] != 0]
    return drawn if drawn.size else None


def _block_sums(values: Floats, length: int) -> Floats:
    """Return the sum of `length` values from each position, wrapping around."""
    totals = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values[: length - 1])))))
    sums: Floats = totals[length:] - totals[:-length]
    return sums


def _draws(size: int, length: int, resamples: int, rng: np.random.Generator) -> Iterator[NDArray[np.intp]]:
    """Yield circular block resamples as index matrices [draws, size], limited by `MAX_DRAWS`."""
    left = max(200, min(resamples, MAX_DRAWS // (2 * size)))
    steps = np.arange(length)
    while left > 0:
        count = min(left, max(1, MATRIX // size))
        starts = rng.integers(0, size, (count, -(-size // length), 1))
        yield ((starts + steps).reshape(count, -1)[:, :size] % size).astype(np.intp)
        left -= count


def _memory(values: Floats) -> tuple[Floats, int]:
    """Return (autocovariances from lag 0, bandwidth of the flat-top window).

    The bandwidth is twice the lag after which correlations are noise.
    """
    size = values.size
    longest = min(size - 1, math.ceil(math.sqrt(size)) + max(5, int(math.sqrt(math.log10(size)))) + 1)
    centred = values - values.mean()
    padded = 1 << int(2 * size - 1).bit_length()
    spectrum = np.fft.rfft(centred, padded)
    covariances: Floats = np.fft.irfft(spectrum * np.conj(spectrum), padded)[: longest + 1] / size
    if covariances[0] <= 1e-30:
        return np.zeros(2), 1
    noise = 2 * math.sqrt(math.log10(size) / size)
    quiet = np.abs(covariances[1:] / covariances[0]) < noise
    run = min(max(5, int(math.sqrt(math.log10(size)))), quiet.size)
    ends = np.convolve(quiet, np.ones(run), "valid") >= run
    last_loud = int(np.argmax(ends)) if ends.any() else longest
    return covariances, int(np.clip(2 * max(last_loud, 1), 1, longest))


def _long_run(covariances: Floats, memory: int) -> float:
    lags = np.arange(1, memory + 1)
    return float(covariances[0] + 2 * np.sum(_flat_top(lags / memory) * covariances[1 : memory + 1]))


def _flat_top(share: Floats) -> Floats:
    """Return the flat-top window: 1 up to one half, then linear to 0 at 1."""
    return np.clip(2 * (1 - np.abs(share)), 0.0, 1.0)


def _below(values: Floats, q: float) -> Floats:
    return (values <= np.percentile(values, q)).astype(np.float64)


def _at_share(ordered: Floats, share: float) -> float:
    return float(np.interp(share * (ordered.size - 1), np.arange(ordered.size), ordered))


def _interval(drawn: Floats, confidence: float) -> Interval:
    low, high = np.percentile(drawn, _tails(confidence))
    return Interval(low=float(low), high=float(high))


def _tails(confidence: float) -> tuple[float, float]:
    return 50 * (1 - confidence), 50 * (1 + confidence)


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
