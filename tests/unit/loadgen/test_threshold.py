"""Capacity estimates from exact and from scattered trials, with their uncertainty."""

import math
import random

import pytest

from loadgen.capacity.threshold import Observation, locate


def share_at(rate_rps: float, capacity_rps: float, slope: float, target: float = 0.9) -> float:
    return 1 / (1 + math.exp(slope * math.log(rate_rps / capacity_rps) - math.log(target / (1 - target))))


def observed(rate_rps: float, share: float, num: int = 400, **more: bool) -> Observation:
    return Observation(rate_rps=rate_rps, num_good=round(share * num), num_judged=num, **more)


def exact(rates: list[float], capacity_rps: float = 10.0, slope: float = 10.0, num: int = 400) -> list[Observation]:
    return [observed(rate, share_at(rate, capacity_rps, slope), num) for rate in rates]


@pytest.mark.parametrize("slope", [3.0, 10.0, 30.0])
def test_trials_on_the_curve_find_its_crossing(slope: float) -> None:
    found = locate(exact([7, 8, 9, 9.5, 10, 10.5, 11, 12], slope=slope, num=4000), 0.9)
    assert found.quantile(0.5) == pytest.approx(10, rel=0.03)
    interval = found.interval(0.95)
    assert interval.high is not None
    assert interval.low < 10 < interval.high
    assert found.weights.sum() == pytest.approx(1)


def test_estimate_is_independent_of_the_scale_of_rates() -> None:
    rates = [0.7, 0.9, 1.0, 1.1, 1.3]
    slow = locate(exact(rates, capacity_rps=1.0), 0.9).interval(0.95)
    fast = locate(exact([rate * 50 for rate in rates], capacity_rps=50.0), 0.9).interval(0.95)
    assert (slow.high, fast.high) != (None, None)
    assert (fast.low / 50, (fast.high or 0) / 50) == pytest.approx((slow.low, slow.high), rel=1e-6)


def test_more_trials_narrow_and_scatter_widens_the_interval() -> None:
    rates = [8.5, 9.5, 10.5, 11.5]

    def width(observations: list[Observation]) -> float:
        interval = locate(observations, 0.9).interval(0.95)
        return (interval.high or math.inf) / interval.low

    one, four = width(exact(rates)), width(exact(rates * 4))
    assert four < one
    rng = random.Random(1)
    scattered = [
        observed(r, min(1.0, max(0.0, share_at(r, 10, 10) + rng.choice((-0.12, 0.12)))), 400) for r in rates * 4
    ]
    assert width(scattered) > 1.3 * four


def test_contradicting_trials_widen_the_interval() -> None:
    """One lucky trial above the capacity, one unlucky trial below."""
    agreeing = locate([observed(9, 0.99), observed(9.5, 0.97), observed(10.5, 0.7), observed(11, 0.6)], 0.9).interval(
        0.95
    )
    crossing = locate([observed(9, 0.7), observed(9.5, 0.6), observed(10.5, 0.99), observed(11, 0.97)], 0.9).interval(
        0.95
    )
    assert crossing.low < agreeing.low
    assert (crossing.high or 0) > (agreeing.high or 0)
    assert crossing.low < 9
    assert (crossing.high or 0) > 11


def test_growing_backlog_means_above_capacity() -> None:
    met = [observed(8, 1.0), observed(9, 1.0), observed(10, 1.0), observed(12, 1.0)]
    blind = locate([*met, observed(11, 1.0)], 0.9).quantile(0.5)
    seeing = locate([*met[:3], observed(12, 1.0, is_overloaded=True), observed(11, 1.0, is_overloaded=True)], 0.9)
    assert blind > 12
    assert 10 < seeing.quantile(0.5) < 11
    assert (seeing.interval(0.9).high or 0) < 12


def test_constant_misses_are_separated_from_load() -> None:
    """5 % are late even at a tenth of the load, and 90 % meet the SLO up to 10.

    Without late responses the curve would not fit.
    """
    lapse = [
        observed(rate, 0.95 * share_at(rate, 10, 20, target=0.9 / 0.95), 2000) for rate in (1, 2, 4, 8, 9, 10, 11, 12)
    ]
    assert locate(lapse, 0.9).quantile(0.5) == pytest.approx(10, rel=0.05)


def test_few_requests_give_little_information() -> None:
    trials = exact([8.5, 9.5, 10.5, 11.5])
    nothing = Observation(rate_rps=10, num_good=0, num_judged=0)
    assert locate([*trials, nothing], 0.9).interval(0.95) == locate(trials, 0.9).interval(0.95)
    few = locate(exact([8.5, 9.5, 10.5, 11.5], num=20), 0.9).interval(0.95)
    many = locate(trials, 0.9).interval(0.95)
    assert few.low < many.low
    assert (few.high or 0) > (many.high or 0)


def test_estimate_stays_near_the_measured_rates() -> None:
    found = locate([observed(5, 1.0), observed(10, 1.0)], 0.9).interval(0.999)
    assert found.low > 3.3
    assert (found.high or 0) <= 15.01
