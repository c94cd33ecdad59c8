"""Arrivals have the stated rates and gaps, in equilibrium from the start, and are never rescaled."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loadgen.loadgen_errors import BadPlan
from loadgen.plan import draws
from loadgen.plan.arrivals import (
    Piece,
    alternating,
    arrivals,
    constant,
    constant_gaps,
    gamma,
    parse_gaps,
    parse_rate,
    poisson,
    poisson_gaps,
    ramp,
    read_times,
    steady,
    steps,
    trace_times,
    weibull,
    weibull_cv,
    weibull_shape,
)
from loadgen.plan.draws import Floats, stream


def cv(times: Floats) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


def test_constant_arrivals_are_exact() -> None:
    assert constant(rate_rps=10, until_s=60).tolist() == [round(i / 10, 6) for i in range(600)]
    assert constant(rate_rps=3, count=4).tolist() == [0, 0.333333, 0.666667, 1]


@pytest.mark.parametrize(
    ("make", "expected_cv"),
    [
        (lambda rng, **k: poisson(rng, rate_rps=50, **k), 1.0),
        (lambda rng, **k: gamma(rng, rate_rps=50, cv=0.3, **k), 0.3),
        (lambda rng, **k: gamma(rng, rate_rps=50, cv=2.5, **k), 2.5),
        (lambda rng, **k: weibull(rng, rate_rps=50, shape=2.0, **k), weibull_cv(2.0)),
        (lambda rng, **k: weibull(rng, rate_rps=50, shape=weibull_shape(2.5), **k), 2.5),
    ],
)
def test_gaps_have_their_mean_and_cv(make: Callable[..., Floats], expected_cv: float) -> None:
    times = make(stream(3, "test"), count=200_000)
    gaps = np.diff(times)
    standard_error = expected_cv / math.sqrt(len(gaps))
    assert abs(gaps.mean() * 50 - 1) < 4 * standard_error
    assert cv(times) == pytest.approx(expected_cv, rel=0.03)
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("process", ["poisson", "gamma:cv=3", "weibull:cv=3", "gamma:cv=0.2"])
def test_processes_start_in_equilibrium(process: str) -> None:
    """20 arrivals are expected in the first 10 s. Starting with a full gap would give 4 more at cv 3."""
    gaps = parse_gaps(process)
    counts = np.array([len(arrivals(stream(seed, process), gaps, steady(2.0), until_s=10.0)) for seed in range(1500)])
    assert abs(counts.mean() - 20) < 4 * counts.std() / math.sqrt(len(counts))
    assert counts.std() / math.sqrt(len(counts)) < 0.4


def test_poisson_counts_have_poisson_variance() -> None:
    """Nothing is rescaled, so the number of arrivals is random."""
    counts = np.array([len(poisson(stream(seed, "n"), rate_rps=5, until_s=20)) for seed in range(1000)])
    assert counts.var() == pytest.approx(100, rel=0.2)
    assert counts.mean() == pytest.approx(100, abs=4 * 10 / math.sqrt(1000))


@pytest.mark.parametrize("process", ["poisson", "constant", "gamma:cv=2", "weibull:cv=2"])
def test_longer_plan_starts_like_a_shorter_one(process: str) -> None:
    def times(**stop: float) -> list[float]:
        rate = parse_rate("onoff:40@5s,10@15s,random")
        return arrivals(stream(1, "a"), parse_gaps(process), rate, **stop).tolist()  # type: ignore[arg-type]

    all_times = times(until_s=400.0)
    assert len(all_times) > 2 * 1024
    assert times(until_s=100.0) == [t for t in all_times if t < 100]
    assert times(count=1500) == all_times[:1500]
    assert times(count=10, until_s=400.0) == all_times[:10]


def test_ramp_rate_changes_linearly() -> None:
    times = ramp(stream(2, "ramp"), start_rps=0, end_rps=200, duration_s=100)
    assert len(times) == pytest.approx(10_000, abs=4 * 100)
    for part in (0.25, 0.5, 0.75):  # the expected share up to t is (t / T)²
        assert (times < 100 * part).mean() == pytest.approx(part**2, abs=4 * 0.5 / 100)
    falling = ramp(stream(2, "ramp"), start_rps=200, end_rps=0, duration_s=100)
    assert (falling < 50).mean() == pytest.approx(0.75, abs=0.02)


def test_inverse_of_a_changing_rate_is_exact() -> None:
    """With constant gaps, the n-th arrival is where the integral of the rate is n."""
    rate = steps([Piece(4.0, 0.0, 2.0), Piece(3.0, 0.0, 0.0), Piece(2.0, 2.0, 1.0), Piece(1.0, 3.0, 3.0)])
    times = arrivals(stream(0, ""), constant_gaps, rate)
    by_hand = [
        0,
        math.sqrt(4),
        math.sqrt(8),
        math.sqrt(12),
        7.0,
        7 + (4 - math.sqrt(12)),
        7 + (4 - math.sqrt(8)),
        9.0,
        9 + 1 / 3,
        9 + 2 / 3,
    ]
    assert times.tolist() == pytest.approx(by_hand, abs=1e-6)


def test_steps_have_their_rates_and_then_end() -> None:
    times = arrivals(stream(4, "steps"), poisson_gaps, steps([Piece(100, rps, rps) for rps in (50, 0, 10)]))
    counts = np.histogram(times, [0, 100, 200, 300])[0]
    assert abs(counts[0] - 5000) < 4 * 71
    assert counts[1] == 0
    assert abs(counts[2] - 1000) < 4 * 32
    assert counts.sum() == len(times)


def test_on_off_rate_alternates() -> None:
    times = arrivals(stream(5, "onoff"), poisson_gaps, alternating((5, 20), (15, 2)), until_s=2000)
    is_on = times % 20 < 5
    assert abs(is_on.sum() - 10_000) < 4 * 100
    assert abs((~is_on).sum() - 3000) < 4 * 55


def test_random_on_off_rate_is_stationary_and_bursty() -> None:
    rate = alternating((5, 20), (15, 0), is_random=True)
    counts = np.array([len(arrivals(stream(seed, "mmpp"), poisson_gaps, rate, until_s=1)) for seed in range(3000)])
    assert abs(counts.mean() - 5) < 4 * counts.std() / math.sqrt(3000)
    assert cv(arrivals(stream(0, "mmpp"), poisson_gaps, rate, count=20_000)) > 5


def test_weibull_shape_is_inverse_of_cv() -> None:
    assert weibull_cv(1.0) == pytest.approx(1.0)
    assert weibull_cv(2.0) == pytest.approx(math.sqrt(4 / math.pi - 1))
    assert weibull_cv(weibull_shape(7.4)) == pytest.approx(7.4)
    with pytest.raises(BadPlan, match="Weibull gaps cannot have cv 1000"):
        weibull_shape(1000)


def test_trace_times_change_only_by_the_factor() -> None:
    assert trace_times([3.0, 1.0, 7.0, 9.0], time_scale=0.5, start_s=2.0, until_s=3.0).tolist() == [0.5, 2.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison", "`poison` is not an arrival process; write poisson, constant"),
        ("poisson:cv=2", "is not an arrival process"),
        ("gamma", "`gamma`: `cv=…` is missing"),
        ("gamma:cv=0", "`gamma:cv=0`: cv must be above 0; write constant"),
        ("gamma:shape=2", "`gamma:shape=2`: `shape=2` is not a known setting; write cv=…"),
        ("weibull:cv=2,shape=1", "give either cv=… or shape=…"),
        ("weibull:cv=x", "`x` is not a number of 0 or more"),
    ],
)
def test_invalid_processes_are_rejected(text: str, message: str) -> None:
    with pytest.raises(BadPlan) as caught:
        parse_gaps(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "the rate is 0 requests/s; it must be above 0"),
        ("-1", "`-1` is not a rate"),
        ("inf", "`inf` is not a rate"),
        ("5rps", "`5rps` is not a number"),
        ("ramp:1-10", "`ramp:1-10`: write ramp:1-10@60s"),
        ("ramp:1@60s", "`ramp:1@60s`: write two numbers, such as 100-800"),
        ("ramp:0-0@60s", "a stepwise rate needs a rate above 0"),
        ("steps:1@5x", "`5x` is not a duration; write 300ms, 5s, 2m or 1h"),
        ("steps:1@0s", "a stepwise rate needs a rate above 0 in at least one step and a duration above 0 in each"),
        ("steps:5", "`steps:5`: write rate@duration, such as 2@60s"),
        ("onoff:1@5s", "`onoff:1@5s`: write two stretches"),
        ("onoff:0@5s,0@5s", "an on/off rate needs two durations above 0 and a rate above 0"),
        ("sine:1", "`sine:1` is not a rate"),
    ],
)
def test_invalid_rates_are_rejected(text: str, message: str) -> None:
    with pytest.raises(BadPlan) as caught:
        parse_rate(text)
    assert message in str(caught.value)


def test_rate_texts_are_parsed() -> None:
    rng = stream(0, "")
    assert list(parse_rate("5")(rng)) == [Piece(math.inf, 5, 5)]
    assert list(parse_rate("ramp:1-10@1m")(rng)) == [Piece(60, 1, 10)]
    assert list(parse_rate("steps: 2@60s, .5@300ms")(rng)) == [Piece(60, 2, 2), Piece(0.3, 0.5, 0.5)]
    pieces = iter(parse_rate("onoff:10@5s,0@15s")(rng))
    assert [next(pieces) for _ in range(3)] == [Piece(5, 10, 10), Piece(15, 0, 0), Piece(5, 10, 10)]


def test_unbounded_rate_raises() -> None:
    with pytest.raises(BadPlan, match="more than 5000 arrivals"):
        arrivals(stream(0, ""), poisson_gaps, steady(1.0), max_arrivals=5000)


def test_times_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "times.txt"
    path.write_text("0\n0.5\n1e1\n")
    assert read_times(str(path)).tolist() == [0, 0.5, 10]
    path.write_text("0.5\n0.25\n")
    with pytest.raises(BadPlan, match=r"times\.txt:2: 0\.25 is before 0\.5 in the previous line"):
        read_times(str(path))
    path.write_text("0\nsoon\n")
    with pytest.raises(BadPlan, match=r"times\.txt:2: `soon` is not a number"):
        read_times(str(path))
    path.write_text("")
    with pytest.raises(BadPlan, match="the file has no times"):
        read_times(str(path))


# The draws beneath.


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 4.0, 300.0])
def test_gamma_draws_have_their_moments(shape: float) -> None:
    values = draws.gamma(stream(1, f"gamma {shape}"), shape, 200_000)
    standard_error = math.sqrt(shape / len(values))
    assert abs(values.mean() - shape) < 4 * standard_error
    assert values.var() == pytest.approx(shape, rel=0.08)


def test_normal_and_exponential_draws_have_their_moments() -> None:
    z = draws.normal(stream(1, "z"), 200_000)
    assert abs(z.mean()) < 4 / math.sqrt(len(z))
    assert z.var() == pytest.approx(1, rel=0.02)
    assert (z**4).mean() == pytest.approx(3, rel=0.05)
    x = draws.exponential(stream(1, "x"), 200_000)
    assert x.mean() == pytest.approx(1, rel=0.01)
    assert x.var() == pytest.approx(1, rel=0.03)


def test_streams_are_independent_and_have_known_values() -> None:
    assert stream(0, "arrivals").random(3).tolist() == [0.972809746419624, 0.8318984687059328, 0.9125684867087402]
    a, b = stream(0, "arrivals").random(10_000), stream(0, "input").random(10_000)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    with pytest.raises(BadPlan, match="the seed is -1; it must not be negative"):
        stream(-1, "x")


def test_choices_follow_their_weights() -> None:
    chosen = draws.choose(stream(0, "c"), [3, 0, 1, 0], 40_000)
    assert set(chosen.tolist()) == {0, 2}
    assert (chosen == 0).mean() == pytest.approx(0.75, abs=0.01)
    weights = draws.zipf_weights(4, 1.0)
    assert weights.tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
