"""The schedule of faults depends only on the seed, and keeps its limits."""

import pytest

from tests.nemesis.faults import FAULTS
from tests.nemesis.goodput import LEAST_SECONDS
from tests.nemesis.plan import (
    DECODE,
    DISK_KINDS,
    KINDS,
    MAX_OPEN,
    PREFILL,
    ROLES,
    SERVICES,
    Fault,
    conflicts,
    make_plan,
    open_faults,
)
from tests.nemesis.run import ALL_ROLES_S, LONG_S, Options

HALF_HOUR_S = 1800.0
RESTART_S = 2.0
"""Shortest time of a restart. A process starts in about three seconds."""


def test_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert make_plan(7, HALF_HOUR_S) == make_plan(7, HALF_HOUR_S)
    assert make_plan(7, HALF_HOUR_S) != make_plan(8, HALF_HOUR_S)


@pytest.mark.parametrize("seed", range(20))
def test_plan_keeps_its_limits(seed: int) -> None:
    plan = make_plan(seed, HALF_HOUR_S)
    assert [fault.begin_s for fault in plan] == sorted(fault.begin_s for fault in plan)
    assert all(fault.begin_s >= 0 and fault.end_s <= HALF_HOUR_S for fault in plan)
    assert conflicts(plan) == []
    assert max(len(open_faults(plan, fault.begin_s)) for fault in plan) == MAX_OPEN
    assert {fault.kind for fault in plan} == set(KINDS), "half an hour has every kind"
    for fault in plan:
        low_s, high_s = KINDS[fault.kind].duration_s
        assert low_s <= fault.duration_s <= high_s
        assert set(fault.targets) <= {*SERVICES, "redis"}
        assert len(set(fault.targets)) == len(fault.targets)


@pytest.mark.parametrize("seed", range(20))
def test_short_plan_has_several_short_faults(seed: int) -> None:
    plan = make_plan(seed, 20.0, longest_s=4.0)
    assert len(plan) >= 3
    assert all(fault.duration_s <= 4.0 for fault in plan)
    assert conflicts(plan) == []


@pytest.mark.parametrize("seed", range(20))
def test_minute_has_many_short_faults_and_nearly_every_kind(seed: int) -> None:
    options = Options.sized(60.0, seed=seed)
    plan = options.plan()
    assert len(plan) >= 20
    kinds = KINDS.keys() if "disk_kv_size" in options.tiers else KINDS.keys() - DISK_KINDS
    assert len({fault.kind for fault in plan}) >= len(kinds) - 2
    assert all(fault.duration_s <= 4.0 for fault in plan)


def alone(plan: tuple[Fault, ...]) -> list[Fault]:
    """The kills of one worker while no other fault is open."""
    return [
        fault
        for fault in plan
        if fault.kind == "kill"
        and all(o is fault or o.released_s <= fault.begin_s or o.begin_s >= fault.released_s for o in plan)
    ]


@pytest.mark.parametrize("seed", range(50))
def test_long_run_has_enough_time_with_one_worker_down_to_measure_goodput(seed: int) -> None:
    assert sum(fault.duration_s + RESTART_S for fault in alone(make_plan(seed, LONG_S))) >= LEAST_SECONDS


@pytest.mark.parametrize("seconds", [ALL_ROLES_S, HALF_HOUR_S])
@pytest.mark.parametrize("seed", range(50))
def test_goodput_of_each_role_is_measured_in_twenty_minutes(seed: int, seconds: float) -> None:
    kills = alone(make_plan(seed, seconds))
    for workers in ROLES.values():
        assert sum(kill.duration_s + RESTART_S for kill in kills if kill.targets[0] in workers) >= LEAST_SECONDS


@pytest.mark.parametrize("seed", range(20))
def test_lost_node_takes_a_prefill_and_a_decode_worker(seed: int) -> None:
    lost = [fault for fault in make_plan(seed, HALF_HOUR_S) if fault.kind == "lost_node"]
    assert lost
    for fault in lost:
        prefill, decode = fault.targets
        assert (prefill in PREFILL, decode in DECODE) == (True, True)
        assert fault.restart_s > 0


def test_only_the_asked_kinds_occur() -> None:
    assert {fault.kind for fault in make_plan(3, HALF_HOUR_S, kinds=["pause", "kill"])} == {"pause", "kill"}
    with pytest.raises(ValueError, match="unknown kinds eclipse"):
        make_plan(3, HALF_HOUR_S, kinds=["eclipse"])


def test_every_kind_can_be_injected() -> None:
    assert FAULTS.keys() == KINDS.keys()
