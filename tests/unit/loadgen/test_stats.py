"""Percentiles by hand, and intervals by their coverage. All draws are seeded."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from loadgen.measure import stats
from loadgen.measure.stats import Interval


def test_percentiles_interpolate_between_the_two_nearest_ranks() -> None:
    """The ranks are 0 to 4, so the 90th percentile is at rank 3.6."""
    assert stats.percentiles([30, 10, 20, 50, 40], (0, 50, 90, 100)) == pytest.approx([10, 30, 46, 50])
    assert stats.percentile([7.0], 99) == 7.0
    assert math.isnan(stats.percentile([], 50))


def test_wilson_interval_equals_published_values() -> None:
    """Values of Brown, Cai and DasGupta 2001; 15 of 20 by hand."""
    found = stats.wilson(15, 20)
    assert (found.low, found.high) == pytest.approx((0.53129, 0.88814), abs=1e-5)
    assert stats.wilson(0, 10) == Interval(low=0.0, high=pytest.approx(0.27753, abs=1e-5))
    assert stats.wilson(10, 10) == Interval(low=pytest.approx(0.72247, abs=1e-5), high=1.0)
    assert stats.wilson(0, 0) == Interval(low=0.0, high=1.0)


def covers(interval: Interval | None, truth: float) -> bool:
    assert interval is not None
    return interval.low <= truth <= (math.inf if interval.high is None else interval.high)


def share_covered(count: int, seed: int, draw: object, interval: object, truth: float) -> float:
    rng = np.random.default_rng(seed)
    return sum(covers(interval(draw(rng), i), truth) for i in range(count)) / count  # type: ignore[operator]


def lognormal(rng: np.random.Generator) -> np.ndarray:
    return rng.lognormal(0.0, 1.0, 300)


def autocorrelated(rng: np.random.Generator) -> np.ndarray:
    """Return x_t = 0.9 x_(t-1) + noise with variance 1, like the latencies of consecutive requests in a
    queue."""
    noise = rng.normal(size=1500) * math.sqrt(1 - 0.9**2)
    series = np.zeros(1500)
    for t in range(1, 1500):
        series[t] = 0.9 * series[t - 1] + noise[t]
    return series[500:]


def test_95_percent_interval_has_95_percent_coverage() -> None:
    mean = share_covered(200, 1, lognormal, lambda x, i: stats.mean_interval(x, seed=i, resamples=400), math.exp(0.5))
    assert 0.88 <= mean <= 0.99
    for q in (50, 90):
        truth = math.exp(NormalDist().inv_cdf(q / 100))
        covered = share_covered(
            200, q, lognormal, lambda x, i, q=q: stats.percentile_interval(x, q, seed=i, resamples=400), truth
        )
        assert 0.90 <= covered <= 0.99


def test_block_bootstrap_keeps_coverage_for_dependent_requests() -> None:
    """An interval from independent draws would cover the mean in about 35 of 100 cases."""
    blocked = share_covered(100, 2, autocorrelated, lambda x, i: stats.mean_interval(x, seed=i, resamples=400), 0.0)
    shuffled = share_covered(
        100,
        2,
        autocorrelated,
        lambda x, i: stats.mean_interval(np.random.default_rng(i).permutation(x), seed=i, resamples=400),
        0.0,
    )
    shares = share_covered(100, 2, autocorrelated, lambda x, i: stats.share_interval(x > 0), 0.5)
    assert blocked >= 0.82
    assert shares >= 0.85
    assert shuffled < 0.6


def test_effective_size_reflects_autocorrelation() -> None:
    rng = np.random.default_rng(3)
    assert stats.block_length(rng.normal(size=1000)) <= 5
    assert stats.block_length(autocorrelated(rng)) >= 15
    assert stats.effective_size(rng.normal(size=1000)) > 700
    assert stats.effective_size(autocorrelated(rng)) < 200
    assert stats.effective_size(np.ones(50)) == 50


def test_gaps_of_one_request_count_as_one_value() -> None:
    """100 requests with 50 equal gaps each give the interval of 100 values, not 5,000."""
    a_request = np.random.default_rng(4).lognormal(size=100)
    alone = stats.percentile_interval(a_request, 50)
    together = stats.percentile_interval(np.repeat(a_request, 50), 50, owners=np.repeat(np.arange(100), 50))
    assert alone is not None
    assert together is not None
    assert alone.high is not None
    assert together.high is not None
    assert together.high - together.low == pytest.approx(alone.high - alone.low, rel=0.2)


def test_p99_of_forty_values_has_no_upper_bound() -> None:
    found = stats.percentile_interval(np.arange(40.0), 99)
    assert found is not None
    assert found.high is None
    assert found.low > 30


def test_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(5).lognormal(size=500)
    assert stats.mean_interval(values, seed=7) == stats.mean_interval(values, seed=7)
    assert stats.mean_interval(values, seed=7) != stats.mean_interval(values, seed=8)


@pytest.mark.parametrize("q", [None, 50.0])
def test_pairing_detects_a_difference_hidden_in_independent_samples(q: float | None) -> None:
    """Prompts differ by much more than the two systems."""
    rng = np.random.default_rng(6)
    before = rng.lognormal(0, 1.5, 400)
    after = before * 1.05 + rng.normal(0, 0.001, 400)
    paired = stats.difference_interval(before, after, q=q, resamples=300)
    alone = stats.independent_difference_interval(before, after, q=q, resamples=300)
    assert paired is not None
    assert paired.low > 0
    assert alone is not None
    assert not alone.excludes_zero


def test_no_difference_gives_an_interval_with_zero() -> None:
    rng = np.random.default_rng(7)
    false_alarms = 0
    for seed in range(100):
        before = rng.lognormal(0, 1, 200)
        found = stats.difference_interval(
            before, before * rng.lognormal(0, 0.2, 200) / math.exp(0.02), seed=seed, resamples=300
        )
        false_alarms += found is not None and found.excludes_zero
    assert false_alarms <= 12


def test_ratio_interval_uses_sums() -> None:
    found = stats.ratio_interval([1.0] * 50 + [9.0] * 50, [10.0] * 100)
    assert found is not None
    assert found.high is not None
    assert found.low < 0.5 < found.high
    assert stats.ratio_interval([1.0, 1.0], [0.0, 0.0]) is None
    assert stats.mean_interval([1.0]) is None


def test_number_of_draws_is_bounded_for_many_records() -> None:
    values = np.random.default_rng(8).lognormal(size=100_000)
    found = stats.mean_interval(values, resamples=50)
    assert covers(found, math.exp(0.5))
