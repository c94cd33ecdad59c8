"""The search: what it proposes, when it ends, and whether it finds known capacities."""

import math

import pytest

from loadgen.capacity.capacity_search import MIN_TRIALS, CapacitySearch, Limits, Proposal, State
from loadgen.capacity.threshold import Observation
from tests.loadgen_simulated_servers import SYSTEMS, search


def answers(proposal: Proposal, capacity_rps: float, slope: float = 15.0, num: int = 400) -> Observation:
    """Observations of a deterministic server that meets 90 % at its capacity."""
    share = 1 / (1 + math.exp(slope * math.log(proposal.rate_rps / capacity_rps) - math.log(9)))
    return Observation(rate_rps=proposal.rate_rps, num_good=round(share * num), num_judged=num)


def run(capacity_rps: float, limits: Limits) -> tuple[CapacitySearch, list[Proposal]]:
    searched = CapacitySearch(0.9, limits)
    asked: list[Proposal] = []
    while (proposal := searched.next()) is not None:
        asked.append(proposal)
        searched.observe(answers(proposal, capacity_rps), is_scout=proposal.is_scout)
        assert len(asked) < 60
    return searched, asked


@pytest.mark.parametrize("capacity_rps", [0.7, 3.0, 11.0, 260.0])
def test_search_scouts_then_brackets_then_narrows(capacity_rps: float) -> None:
    searched, asked = run(capacity_rps, Limits(start_rps=2.0))
    scouts = [proposal.rate_rps for proposal in asked if proposal.is_scout]
    assert scouts == [2.0 * 2.0 ** (step if capacity_rps > 2 else -step) for step in range(len(scouts))]
    assert min(scouts[-2:]) <= capacity_rps <= max(scouts[-2:])
    trial_rates = [proposal.rate_rps for proposal in asked if not proposal.is_scout]
    assert [proposal.is_scout for proposal in asked] == [True] * len(scouts) + [False] * len(trial_rates)
    assert all(capacity_rps / 2 < rate < 2 * capacity_rps for rate in trial_rates)
    answer = searched.answer
    assert answer.state is State.FOUND
    assert answer.capacity_rps == pytest.approx(capacity_rps, rel=0.05)
    assert answer.interval is not None
    assert answer.interval.high is not None
    assert answer.interval.low < capacity_rps < answer.interval.high <= 1.1 * answer.interval.low
    assert (answer.num_trials, answer.num_scouts) == (len(trial_rates), len(scouts))
    assert answer.num_trials >= MIN_TRIALS


def test_search_ends_wide_when_trials_are_used_up() -> None:
    searched, asked = run(10.0, Limits(resolution=0.001, max_trials=8))
    assert searched.answer.state is State.WIDE
    assert sum(not proposal.is_scout for proposal in asked) == 8
    assert searched.answer.interval is not None


def test_proposal_is_repeated_until_observed() -> None:
    searched = CapacitySearch(0.9, Limits())
    assert searched.next() == searched.next() == Proposal(rate_rps=1.0, is_scout=True)


def test_search_stays_below_the_limit_and_reports_above() -> None:
    searched, asked = run(1000.0, Limits(max_rps=30.0))
    assert max(proposal.rate_rps for proposal in asked) == 30.0
    assert searched.answer.state is State.ABOVE
    assert searched.answer.held_rps == 30.0
    assert searched.answer.interval is None


@pytest.mark.parametrize("max_rps", [12.3667, 12.3334, 0.99951])
def test_limit_with_many_digits_is_never_exceeded(max_rps: float) -> None:
    """A trace has no more requests above its limit."""
    searched, asked = run(1000.0, Limits(start_rps=0.5, max_rps=max_rps))
    highest = max(proposal.rate_rps for proposal in asked)
    assert 0.99 * max_rps < highest <= max_rps
    assert len(str(highest)) <= len("0.999")
    assert searched.answer.state is State.ABOVE


def test_limits_without_a_three_digit_rate_between_them() -> None:
    _, asked = run(1000.0, Limits(min_rps=12.341, max_rps=12.349))
    assert {proposal.rate_rps for proposal in asked} == {12.349}


def test_server_that_never_meets_its_slo_is_below() -> None:
    searched, asked = run(1e-6, Limits(min_rps=0.2))
    assert min(proposal.rate_rps for proposal in asked) == 0.2
    assert searched.answer.state is State.BELOW
    assert searched.answer.broke_rps == 0.2
    assert searched.answer.capacity_rps is None


def test_wrong_scout_is_corrected_by_full_trials() -> None:
    searched = CapacitySearch(0.9, Limits())
    for rate, share in ((1.0, 1.0), (2.0, 0.0)):
        proposal = searched.next()
        assert proposal is not None
        searched.observe(Observation(rate_rps=rate, num_good=round(20 * share), num_judged=20), is_scout=True)
    while (proposal := searched.next()) is not None:
        searched.observe(answers(proposal, 5.0))
    assert searched.answer.capacity_rps == pytest.approx(5.0, rel=0.06)


def test_stopped_search_keeps_its_estimate() -> None:
    searched = CapacitySearch(0.9, Limits())
    searched.stop("interrupted")
    assert searched.next() is None
    assert (searched.answer.state, searched.answer.why) == (State.STOPPED, "interrupted")
    searched, _ = run(10.0, Limits())
    searched.stop("too late")
    assert (searched.answer.state, searched.answer.why) == (State.FOUND, "")


def test_observations_of_other_searches_save_trials() -> None:
    alone, _ = run(10.0, Limits())
    helped = CapacitySearch(0.9, Limits())
    for rate in (8.0, 9.0, 9.5, 10.5, 11.0, 12.0):
        helped.observe(answers(Proposal(rate_rps=rate, is_scout=False), 10.0), is_own=False)
    num_asked = 0
    while (proposal := helped.next()) is not None:
        assert not proposal.is_scout
        helped.observe(answers(proposal, 10.0))
        num_asked += 1
    assert num_asked < alone.answer.num_trials
    assert helped.answer.state is State.FOUND


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num"), [("8 slots", 12), ("decode worker", 8)])
def test_intervals_contain_the_true_capacity_and_overlap(name: str, num: int) -> None:
    """Three of twelve intervals at 95 % confidence fail by chance once in fifty times; the seeds are
    fixed."""
    system = SYSTEMS[name]
    found = [search(system, 60.0, 1000 + seed)[0] for seed in range(num)]
    intervals = [answer.interval for answer in found if answer.interval is not None]
    assert len(intervals) == num
    bounds = [(interval.low, interval.high or math.inf) for interval in intervals]
    holds = [low <= system.capacity_rps <= high for low, high in bounds]
    assert sum(holds) >= num - 2, bounds
    assert all(a[0] <= b[1] and b[0] <= a[1] for a, b in zip(bounds[::2], bounds[1::2], strict=True)), bounds
    errors = [math.log(answer.capacity_rps / system.capacity_rps) for answer in found if answer.capacity_rps]
    assert abs(sum(errors)) / num < 0.04
    assert sorted(high / low for low, high in bounds)[num // 2] < 1.5
