"""Names, roles, cores and GPUs of the workers of a configuration."""

from collections.abc import Collection

import pytest

from baton.core.cluster.worker_report import WorkerRole
from baton.fleet.worker_plan import max_workers_per_gpu, plan_changes, plan_workers, share_cores
from baton.runtime.config.settings import FleetConfig


def test_workers_are_ordered_prefill_decode_hybrid() -> None:
    specs = plan_workers(FleetConfig(prefill=2, decode=1, hybrid=1), cores=[])
    assert [(s.worker_id, s.role.value) for s in specs] == [
        ("w0", "prefill"),
        ("w1", "prefill"),
        ("w2", "decode"),
        ("w3", "hybrid"),
    ]


def test_name_on_an_existing_ray_cluster_does_not_depend_on_other_roles() -> None:
    def names(prefill: int) -> list[str]:
        return [
            spec.worker_id for spec in plan_workers(FleetConfig(prefill=prefill, decode=2, ray_address="h:1"), cores=[])
        ]

    assert names(prefill=1) == ["prefill-0", "decode-0", "decode-1"]
    assert names(prefill=2) == ["prefill-0", "prefill-1", "decode-0", "decode-1"]


@pytest.mark.parametrize(
    ("cores", "num_workers", "shares"),
    [
        ([], 2, [(), ()]),
        ([0, 1], 2, [(0,), (1,)]),
        ([0, 1, 2, 3, 4], 2, [(0, 1), (2, 3, 4)]),
        ([4, 5], 3, [(4,), (5,), (4,)]),
    ],
)
def test_cores_are_divided_evenly(cores: list[int], num_workers: int, shares: list[tuple[int, ...]]) -> None:
    assert share_cores(cores, num_workers) == shares


@pytest.mark.parametrize(
    ("gpus", "shown", "most"),
    [
        ([], ["", "", ""], 3),
        (["a"], ["a", "a", "a"], 3),
        (["a", "b"], ["a", "b", "a"], 2),
        (["a", "b", "c", "d"], ["a", "b", "c"], 1),
    ],
)
def test_gpus_are_assigned_round_robin(gpus: list[str], shown: list[str], most: int) -> None:
    specs = plan_workers(FleetConfig(prefill=1, decode=2), cores=[], gpus=gpus)
    assert [spec.gpu for spec in specs] == shown
    assert max_workers_per_gpu(specs) == most
    assert max_workers_per_gpu([]) == 1


def added(number: int, is_waiting: dict[str, bool], left_behind: Collection[str] = ()) -> list[str]:
    new, removed = plan_changes(WorkerRole.DECODE, number, is_waiting, left_behind)
    assert {spec.role for spec in new} <= {WorkerRole.DECODE}
    assert removed == []
    return [spec.worker_id for spec in new]


def test_missing_workers_get_the_lowest_free_index() -> None:
    assert added(3, {}) == ["decode-0", "decode-1", "decode-2"]
    assert added(3, {"decode-1": False}) == ["decode-0", "decode-2"]
    assert added(1, {"decode-1": False}) == []


def test_workers_left_behind_are_added_first() -> None:
    left_behind = {"decode-12", "decode-7", "prefill-1", "decode-x", "w0"}
    assert added(3, {}, left_behind) == ["decode-7", "decode-12", "decode-0"]
    assert added(2, {"decode-7": False}, left_behind) == ["decode-12"]


def test_only_waiting_workers_are_removed() -> None:
    is_waiting = {"decode-0": True, "decode-2": True, "decode-10": True, "decode-11": False}
    assert plan_changes(WorkerRole.DECODE, 2, is_waiting, ()) == ([], ["decode-10", "decode-2"])
    assert plan_changes(WorkerRole.DECODE, 0, is_waiting, ()) == ([], ["decode-10", "decode-2", "decode-0"])
    assert plan_changes(WorkerRole.DECODE, 4, is_waiting, ()) == ([], [])
