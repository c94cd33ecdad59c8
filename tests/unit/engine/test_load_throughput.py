"""`LoadThroughput`: the measured speed of loads that overlap, and what it predicts."""

import pytest

from baton.engine.tiers.load_throughput import LoadThroughput


def test_nothing_is_predicted_before_the_first_load() -> None:
    assert LoadThroughput().predicted_s(1000) is None


def test_a_load_takes_its_bytes_at_the_measured_speed() -> None:
    speed = LoadThroughput()
    speed.begin(5.0)
    speed.end(1000, 6.0)
    assert speed.predicted_s(3000) == pytest.approx(3.0)


def test_loads_that_overlap_share_the_speed() -> None:
    """Two loads of 1000 bytes that take 2 s together: 1000 bytes/s, not 500."""
    speed = LoadThroughput()
    speed.begin(0.0)
    speed.begin(0.0)
    speed.end(1000, 2.0)
    speed.end(1000, 2.0)
    assert speed.s_per_byte == pytest.approx(0.002)  # the first of them took all of the time
    for at_s in (10.0, 20.0, 30.0):
        speed.begin(at_s)
        speed.begin(at_s)
        speed.end(1000, at_s + 1.0)
        speed.end(1000, at_s + 2.0)
    assert speed.s_per_byte == pytest.approx(0.001, rel=0.3)


def test_idle_time_does_not_count() -> None:
    speed = LoadThroughput()
    for at_s in (0.0, 100.0, 200.0):
        speed.begin(at_s)
        speed.end(1000, at_s + 1.0)
    assert speed.s_per_byte == pytest.approx(0.001)


def test_loads_under_way_are_left_to_the_caller() -> None:
    """`Reloads` counts those of all tiers. They must not count twice."""
    speed = LoadThroughput()
    speed.begin(0.0)
    speed.end(1000, 1.0)
    speed.begin(10.0)
    assert speed.predicted_s(1000) == pytest.approx(1.0)


def test_a_load_takes_at_least_as_long_as_a_part() -> None:
    speed = LoadThroughput()
    speed.begin(0.0)
    speed.observe_part(0.1)
    speed.end(1000, 0.001)
    assert speed.predicted_s(1) == pytest.approx(0.1)
    for _ in range(40):
        speed.observe_part(0.01)
    assert speed.predicted_s(1) == pytest.approx(0.01, rel=0.01)


def test_a_load_that_read_nothing_says_nothing() -> None:
    speed = LoadThroughput()
    speed.begin(0.0)
    speed.end(0, 5.0)
    assert speed.predicted_s(1000) is None


def test_loads_under_way_count_after_the_others_were_forgotten() -> None:
    speed = LoadThroughput()
    speed.begin(0.0)
    speed.observe_part(9.0)
    speed.end(1000, 10.0)
    speed.begin(20.0)
    speed.forget()
    assert speed.predicted_s(1000) is None
    speed.end(1000, 21.0)
    assert speed.predicted_s(1000) == pytest.approx(1.0)
