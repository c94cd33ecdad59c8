"""`LoadTimes`: the line through measured loads, and what it predicts."""

import random
import statistics

import pytest

from baton.engine.tiers.load_times import LoadTimes

FIXED_S, BLOCK_S = 0.001, 1e-4


def one(times: LoadTimes, num_blocks: int, took_s: float, *, at_s: float = 0.0, **more: float) -> None:
    times.begin(at_s)
    times.end(num_blocks, at_s + took_s, is_complete=True, **more)


def measured(*sizes: int) -> LoadTimes:
    times = LoadTimes()
    for size in sizes:
        one(times, size, FIXED_S + BLOCK_S * size)
    return times


def test_nothing_is_predicted_before_the_first_load() -> None:
    times = LoadTimes()
    assert (times.is_known, times.block_s, times.fixed_s, times.predicted_s(1000)) == (False, None, 0.0, None)


def test_a_load_takes_a_fixed_time_and_that_of_its_blocks() -> None:
    times = measured(1, 10, 100)
    assert times.fixed_s == pytest.approx(FIXED_S)
    assert times.block_s == pytest.approx(BLOCK_S)
    assert times.predicted_s(1000) == pytest.approx(FIXED_S + 1000 * BLOCK_S)


def test_loads_of_one_size_are_split_by_the_speed_of_copies() -> None:
    times = LoadTimes()
    one(times, 10, 0.003, copy_block_s=BLOCK_S)
    assert times.predicted_s(10) == pytest.approx(0.003)
    assert times.fixed_s == pytest.approx(0.003 - 10 * BLOCK_S)


@pytest.mark.parametrize("copy_block_s", [None, 1.0])
def test_without_a_plausible_speed_of_copies_blocks_take_all_of_the_time(copy_block_s: float | None) -> None:
    times = LoadTimes()
    one(times, 10, 0.003, copy_block_s=copy_block_s)
    assert times.predicted_s(20) == pytest.approx(0.006)


def test_many_loads_of_one_size_do_not_displace_other_sizes() -> None:
    times = measured(1, *[80] * 1000)
    assert times.predicted_s(1) == pytest.approx(FIXED_S + 1 * BLOCK_S)


def test_a_larger_load_is_never_free() -> None:
    times = LoadTimes()
    for size in (10, 20, 40, 80):
        one(times, size, 0.002)
    assert times.predicted_s(10) == pytest.approx(0.002, rel=0.1)
    assert times.predicted_s(8 * 16 * 10) == pytest.approx(0.004, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_ratios_stay_near_one_although_some_loads_wait(seed: int) -> None:
    """A fifth of the loads waits for a step, and times vary by a fifth."""
    rng, times, ratios = random.Random(seed), LoadTimes(), []
    for number in range(400):
        size = int(2 ** rng.uniform(0, 6))
        took_s = (FIXED_S + BLOCK_S * size) * rng.uniform(0.8, 1.2) + (0.008 if rng.random() < 0.2 else 0.0)
        predicted_s = times.predicted_s(size)
        if predicted_s is not None:
            ratios.append(predicted_s / took_s)
        one(times, size, took_s, at_s=float(number))
    assert 0.9 <= statistics.median(ratios) <= 1.1
    assert statistics.quantiles(ratios, n=10)[-1] <= 1.5


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_change_of_speed_is_followed(factor: float) -> None:
    rng, times = random.Random(1), measured(*[10] * 50, *[40] * 50, *[160] * 50)
    for number in range(40):
        size = rng.choice((10, 40, 160))
        one(times, size, factor * (FIXED_S + BLOCK_S * size), at_s=float(number))
    assert times.predicted_s(80) == pytest.approx(factor * (FIXED_S + BLOCK_S * 80), rel=0.01)


def test_old_loads_of_other_sizes_do_not_count() -> None:
    times = measured(*[10] * 7)
    one(times, 640, 1.0, at_s=10_000.0)
    assert times.predicted_s(640) == pytest.approx(1.0)
    assert times.predicted_s(320) == pytest.approx(0.5)


def test_loads_that_overlap_count_as_one() -> None:
    """Two loads of 1000 blocks that take 2 s together: 1000 blocks/s, not 500."""
    times = LoadTimes()
    times.begin(5.0)
    times.begin(5.5)
    times.end(1000, 6.0, is_complete=True)
    assert not times.is_known
    times.end(1000, 7.0, is_complete=True)
    assert times.predicted_s(2000) == pytest.approx(2.0)


def test_idle_time_does_not_count() -> None:
    times = LoadTimes()
    for at_s in (0.0, 100.0, 200.0):
        one(times, 1000, 1.0, at_s=at_s)
    assert times.predicted_s(1000) == pytest.approx(1.0)


@pytest.mark.parametrize(("num_blocks", "is_complete"), [(0, True), (0, False), (500, False)])
def test_a_load_that_is_not_complete_says_nothing(num_blocks: int, is_complete: bool) -> None:
    times = LoadTimes()
    times.begin(0.0)
    times.begin(0.0)
    times.end(num_blocks, 5.0, is_complete=is_complete)
    times.end(0, 6.0, is_complete=is_complete)
    assert not times.is_known
    one(times, 1000, 1.0, at_s=10.0)
    assert times.predicted_s(1000) == pytest.approx(1.0)


def test_no_load_is_predicted_to_be_shorter_than_a_late_read() -> None:
    times = measured(10, 40)
    times.late(0.4)
    times.late(0.3)
    assert times.predicted_s(10) == pytest.approx(0.4)
    times.forget_late()
    assert times.predicted_s(10) == pytest.approx(FIXED_S + 10 * BLOCK_S)


def test_loads_under_way_count_after_the_others_were_forgotten() -> None:
    times = measured(10)
    times.begin(20.0)
    times.forget()
    assert times.predicted_s(1000) is None
    times.end(1000, 21.0, is_complete=True)
    assert times.predicted_s(1000) == pytest.approx(1.0)
