"""The schedule of faults depends only on the seed, and keeps its limits."""

import pytest

from tests.nemesis.faults import FAULTS
from tests.nemesis.plan import KINDS, MAX_OPEN, SERVICES, conflicts, make_plan, open_faults

HALF_HOUR_S = 1800.0


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


def test_workers_are_killed_while_no_other_fault_is_open() -> None:
    """Goodput with one worker down is measured in such times."""
    plan = make_plan(1, HALF_HOUR_S)
    kills = [fault for fault in plan if fault.kind == "kill"]
    alone = [
        fault
        for fault in kills
        if all(o is fault or o.released_s <= fault.begin_s or o.begin_s >= fault.released_s for o in plan)
    ]
    assert len(alone) >= 3


def test_only_the_asked_kinds_occur() -> None:
    assert {fault.kind for fault in make_plan(3, HALF_HOUR_S, kinds=["pause", "kill"])} == {"pause", "kill"}
    with pytest.raises(ValueError, match="unknown kinds eclipse"):
        make_plan(3, HALF_HOUR_S, kinds=["eclipse"])


def test_every_kind_can_be_injected() -> None:
    assert FAULTS.keys() == KINDS.keys()
