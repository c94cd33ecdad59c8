"""`LoadTimes`: the line through measured loads, and what it predicts."""

import random
import statistics

import pytest

from baton.engine.tiers.load_times import LATE_S, LoadCost, LoadTimes

FIXED_S, BLOCK_S = 0.001, 1e-4
MIN = 60.0


def true_s(num_blocks: int) -> float:
    return FIXED_S + BLOCK_S * num_blocks


def one(
    times: LoadTimes, num_blocks: int, took_s: float, *, at_s: float = 0.0, copy_block_s: float | None = None
) -> None:
    times.begin(at_s - took_s)
    times.end(num_blocks, at_s, num_wanted=num_blocks, copy_block_s=copy_block_s)


def measured(*sizes: int) -> LoadTimes:
    times = LoadTimes()
    for size in sizes:
        one(times, size, true_s(size))
    return times


def test_nothing_is_predicted_before_the_first_load() -> None:
    times = LoadTimes()
    assert times.cost(0.0) is None
    assert times.predicted_s(1000, 0.0) is None


def test_a_load_takes_a_fixed_time_and_that_of_its_blocks() -> None:
    times = measured(1, 10, 100)
    cost = times.cost(0.0)
    assert cost is not None
    assert (cost.fixed_s, cost.block_s) == (pytest.approx(FIXED_S), pytest.approx(BLOCK_S))
    assert times.predicted_s(1000, 0.0) == pytest.approx(true_s(1000))


def test_loads_of_one_size_are_split_by_the_time_of_a_copy() -> None:
    times = LoadTimes()
    one(times, 10, 0.003, copy_block_s=BLOCK_S)
    assert times.cost(0.0) == LoadCost(pytest.approx(0.002), BLOCK_S)


@pytest.mark.parametrize("copy_block_s", [None, 1.0])
def test_without_a_plausible_time_of_a_copy_blocks_take_all_of_the_time(copy_block_s: float | None) -> None:
    times = LoadTimes()
    one(times, 10, 0.003, copy_block_s=copy_block_s)
    assert times.predicted_s(20, 0.0) == pytest.approx(0.006)


def test_many_loads_of_one_size_do_not_displace_other_sizes() -> None:
    times = measured(1, *[80] * 1000)
    assert times.predicted_s(1, 0.0) == pytest.approx(true_s(1))


def test_a_larger_load_is_never_free() -> None:
    times = LoadTimes()
    for size in (10, 20, 40, 80):
        one(times, size, 0.002)
    assert times.predicted_s(10, 0.0) == pytest.approx(0.002, rel=0.1)
    assert times.predicted_s(16 * 80, 0.0) == pytest.approx(0.004, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [(1, 64), (1, 2000), (4, 8), (60, 68), (120, 135), (250, 262)])
@pytest.mark.parametrize("waiting", [0.0, 0.2])
def test_ratios_stay_near_one_although_some_loads_wait(sizes: tuple[int, int], waiting: float, seed: int) -> None:
    """Some loads wait for a step of 8 ms, and times vary by a fifth."""
    rng, times, ratios = random.Random(seed), LoadTimes(), []
    for number in range(400):
        size = int(sizes[0] * (sizes[1] / sizes[0]) ** rng.random())
        took_s = true_s(size) * rng.uniform(0.8, 1.2) + (0.008 if rng.random() < waiting else 0.0)
        predicted_s = times.predicted_s(size, float(number))
        if predicted_s is not None:
            ratios.append(predicted_s / took_s)
        one(times, size, took_s, at_s=float(number), copy_block_s=BLOCK_S / 2)
    assert 0.9 <= statistics.median(ratios) <= 1.1
    assert statistics.quantiles(ratios, n=10)[-1] <= 1.5


@pytest.mark.parametrize("sizes", [(10,), (160,), (10, 40, 160)])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_change_of_speed_is_followed_at_all_sizes(factor: float, sizes: tuple[int, ...]) -> None:
    rng, times = random.Random(1), measured(*[10] * 50, *[40] * 50, *[160] * 50)
    for number in range(20):
        size = rng.choice(sizes)
        one(times, size, factor * true_s(size), at_s=float(number), copy_block_s=factor * BLOCK_S)
    assert times.predicted_s(80, 20.0) == pytest.approx(factor * true_s(80), rel=0.01)


def test_a_slow_load_changes_no_other_size() -> None:
    times = measured(*[10] * 7)
    one(times, 40, true_s(40) + 0.05)
    assert times.predicted_s(10, 0.0) == pytest.approx(true_s(10), rel=0.5)


def test_a_measurement_at_start_is_replaced_by_the_first_load() -> None:
    times = LoadTimes()
    one(times, 8, 0.5)
    times.forget_with_the_next()
    assert times.predicted_s(8, 0.0) == pytest.approx(0.5)
    for _ in range(2):
        one(times, 64, true_s(64), copy_block_s=BLOCK_S)
    assert times.predicted_s(8, 0.0) == pytest.approx(true_s(8))


def test_old_loads_do_not_count() -> None:
    times = measured(*[10] * 7)
    assert times.predicted_s(10, 9 * MIN) == pytest.approx(true_s(10))
    one(times, 640, 1.0, at_s=9 * MIN)
    assert times.predicted_s(320, 11 * MIN) == pytest.approx(0.5)
    assert times.predicted_s(320, 20 * MIN) is None


def test_loads_that_overlap_count_as_one() -> None:
    """Two loads of 1000 blocks that take 0.8 s together: 2500 blocks/s, not 1250."""
    times = LoadTimes()
    times.begin(5.0)
    times.begin(5.2)
    times.end(1000, 5.5, num_wanted=1000, copy_block_s=None)
    assert times.cost(5.5) is None
    times.end(1000, 5.8, num_wanted=1000, copy_block_s=None)
    assert times.predicted_s(2000, 6.0) == pytest.approx(0.8)


def test_loads_that_overlap_without_end_are_counted() -> None:
    times = LoadTimes()
    times.begin(0.0)
    for number in range(1, 400):
        times.begin(0.02 * number)
        times.end(10, 0.02 * number, num_wanted=10, copy_block_s=None)
    assert times.predicted_s(10, 8.0) == pytest.approx(0.02, rel=0.1)


def test_idle_time_does_not_count() -> None:
    times = LoadTimes()
    for at_s in (0.0, 100.0, 200.0):
        one(times, 1000, 1.0, at_s=at_s)
    assert times.predicted_s(1000, 200.0) == pytest.approx(1.0)


@pytest.mark.parametrize("num_blocks", [0, 500])
def test_loads_that_are_not_complete_are_not_counted(num_blocks: int) -> None:
    times = LoadTimes()
    times.begin(0.0)
    times.begin(0.0)
    times.end(num_blocks, 0.5, num_wanted=1000, copy_block_s=None)
    times.end(1000, 0.6, num_wanted=1000, copy_block_s=None)
    assert times.predicted_s(1000, 1.0) is None
    one(times, 1000, 1.0, at_s=10.0)
    assert times.predicted_s(1000, 10.0) == pytest.approx(1.0)


@pytest.mark.parametrize("num_known", [0, 5])
def test_a_load_that_was_cut_off_limits_the_predictions_for_a_minute(num_known: int) -> None:
    """A disk that has become twenty times slower reads 115 of 512 blocks until the time of the job ends."""
    times = measured(*[512] * num_known)
    for number in range(5):
        at_s = 1.0 + number
        times.begin(at_s - 0.3)
        times.end(115, at_s, num_wanted=512, is_cut_off=True, copy_block_s=None)
    assert times.predicted_s(512, 5.0) == pytest.approx(512 * 0.3 / 115)
    later_s = times.predicted_s(512, 6.0 + LATE_S)
    assert later_s == (pytest.approx(true_s(512)) if num_known else None)


def test_no_load_is_predicted_to_be_shorter_than_a_late_read() -> None:
    times = measured(10, 40)
    times.read_was_late(8, 0.4, 10.0)
    times.read_was_late(8, 0.3, 12.0)
    assert times.predicted_s(1, 13.0) == pytest.approx(0.4)
    assert times.predicted_s(80, 13.0) == pytest.approx(4.0)
    assert times.predicted_s(1, 11.0 + LATE_S) == pytest.approx(0.4), "the last one counts for a minute, too"
    assert times.predicted_s(10, 12.0 + LATE_S) == pytest.approx(true_s(10))


def test_a_fast_load_ends_the_limit_of_a_late_read() -> None:
    times = measured(10, 40)
    times.read_was_late(8, 0.4, 10.0)
    one(times, 10, true_s(10), at_s=11.0)
    assert times.predicted_s(10, 12.0) == pytest.approx(true_s(10))


def test_loads_under_way_count_after_the_others_were_forgotten() -> None:
    times = measured(10)
    times.begin(20.0)
    times.forget()
    assert times.predicted_s(1000, 20.0) is None
    times.end(1000, 21.0, num_wanted=1000, copy_block_s=None)
    assert times.predicted_s(1000, 21.0) == pytest.approx(1.0)
