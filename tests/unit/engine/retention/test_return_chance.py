"""Hazards from counted pauses, and the rate at which content returns."""

from random import Random

import pytest

from baton.engine.retention.return_chance import (
    EDGES_S,
    MAX_COUNTED,
    NUM_BINS,
    PRIOR_WEIGHT,
    PauseCounts,
    bin_of,
    return_rate,
    with_own_pauses,
)


@pytest.mark.parametrize(("age_s", "index"), [(-1.0, 0), (0.0, 0), (0.249, 0), (0.25, 1), (5000.0, NUM_BINS)])
def test_bins_of_ages(age_s: float, index: int) -> None:
    assert bin_of(age_s) == index


def test_hazard_is_the_share_that_returned_of_what_the_bin_began_with() -> None:
    counts = PauseCounts(0.5)
    assert counts.hazards() == [0.5] * NUM_BINS
    for _ in range(12):
        counts.begin(0, 3)
    for _ in range(6):
        counts.end(3)
    assert counts.hazards()[3] == pytest.approx((6 + PRIOR_WEIGHT / 2) / (12 + PRIOR_WEIGHT))
    assert counts.hazards()[2] == pytest.approx(PRIOR_WEIGHT / 2 / (12 + PRIOR_WEIGHT))
    assert counts.hazards()[4] == 0.5


def test_old_pauses_count_less() -> None:
    counts = PauseCounts(0.0)
    for _ in range(int(MAX_COUNTED)):
        counts.begin(0, 0)
        counts.end(0)
    for _ in range(int(1.5 * MAX_COUNTED)):
        counts.begin(0, 0)
    assert counts.hazards()[0] < 0.2


def test_pauses_beyond_the_bins_are_no_return() -> None:
    counts = PauseCounts(0.0)
    counts.begin(0, NUM_BINS + 5)
    counts.end(NUM_BINS)
    assert counts.hazards() == [0.0] * NUM_BINS


def test_own_pauses_outweigh_those_of_the_kind() -> None:
    kind = [0.1] * NUM_BINS
    own = with_own_pauses(kind, [(7, 1.0)] * 8, 2.0)
    assert own[7] == pytest.approx((8 * 0.4 + 0.2) / (8 * 0.7 + 2)), "of the parts that were idle when it began"
    assert own[6] == pytest.approx((8 * 0.2 + 0.2) / (8 * 0.9 + 2))
    assert own[4] == pytest.approx(0.2 / 10), "it never returned so early"
    assert own[10] == pytest.approx(0.1), "it was never idle for so long"
    assert with_own_pauses(kind, [], 2.0) == pytest.approx(kind)


def test_content_that_returns_sooner_has_a_higher_rate() -> None:
    soon, late = [0.0] * NUM_BINS, [0.0] * NUM_BINS
    soon[bin_of(2.0)] = late[bin_of(60.0)] = 0.9
    assert return_rate(soon, 0.0) > 10 * return_rate(late, 0.0)
    assert return_rate(soon, 10.0) == 0.0
    assert return_rate(late, 50.0) > return_rate(late, 0.0) > 0.0
    assert return_rate(late, 1e6) == 0.0


def test_rate_is_the_best_over_all_times_to_keep() -> None:
    """Compared with a direct computation over each time until which content may be kept."""
    rng = Random(1)
    for _ in range(200):
        hazards = [rng.choice([0.0, rng.random()]) for _ in range(NUM_BINS)]
        age_s = rng.uniform(0.0, 100.0)
        rates = []
        for until in range(bin_of(age_s), NUM_BINS):
            left, chance, kept_s = 1.0, 0.0, 0.0
            for index in range(bin_of(age_s), until + 1):
                width_s = EDGES_S[index + 1] - max(age_s, EDGES_S[index])
                returned = 1 - (1 - hazards[index]) ** (width_s / (EDGES_S[index + 1] - EDGES_S[index]))
                kept_s += left * (1 - returned) * width_s + left * returned * width_s / 2
                chance += left * returned
                left *= 1 - returned
            rates.append(chance / kept_s)
        assert return_rate(hazards, age_s) == pytest.approx(max(rates))


def test_rate_does_not_rise_towards_the_end_of_a_bin() -> None:
    hazards = [0.2] * NUM_BINS
    edge_s = EDGES_S[12]
    assert return_rate(hazards, edge_s - 1e-6) == pytest.approx(return_rate(hazards, EDGES_S[11]), rel=0.01)
