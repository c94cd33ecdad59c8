"""Names, roles and cores of the workers that a configuration asks for."""

from collections.abc import Collection

import pytest

from baton.core.cluster.worker_report import WorkerRole
from baton.fleet.worker_plan import changes, most_on_a_gpu, plan_workers, share_cores
from baton.runtime.config.settings import FleetConfig


def test_prefill_then_decode_then_hybrid() -> None:
    specs = plan_workers(FleetConfig(prefill=2, decode=1, hybrid=1), cores=[])
    assert [(s.worker_id, s.role.value) for s in specs] == [
        ("w0", "prefill"),
        ("w1", "prefill"),
        ("w2", "decode"),
        ("w3", "hybrid"),
    ]


def test_on_a_cluster_of_others_a_name_stays_when_there_are_more_of_another_role() -> None:
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
def test_cores_are_shared_evenly(cores: list[int], num_workers: int, shares: list[tuple[int, ...]]) -> None:
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
def test_gpus_are_given_out_in_turns(gpus: list[str], shown: list[str], most: int) -> None:
    specs = plan_workers(FleetConfig(prefill=1, decode=2), cores=[], gpus=gpus)
    assert [spec.gpu for spec in specs] == shown
    assert most_on_a_gpu(specs) == most
    assert most_on_a_gpu([]) == 1


def added(number: int, waits: dict[str, bool], left_behind: Collection[str] = ()) -> list[str]:
    new, dropped = changes(WorkerRole.DECODE, number, waits, left_behind)
    assert {spec.role for spec in new} <= {WorkerRole.DECODE}
    assert dropped == []
    return [spec.worker_id for spec in new]


def test_what_is_missing_is_added_with_the_least_number_that_is_free() -> None:
    assert added(3, {}) == ["decode-0", "decode-1", "decode-2"]
    assert added(3, {"decode-1": False}) == ["decode-0", "decode-2"]
    assert added(1, {"decode-1": False}) == []


def test_what_has_an_actor_already_comes_first() -> None:
    there = {"decode-12", "decode-7", "prefill-1", "decode-x", "w0"}
    assert added(3, {}, there) == ["decode-7", "decode-12", "decode-0"]
    assert added(2, {"decode-7": False}, there) == ["decode-12"]


def test_of_too_many_only_those_without_a_node_go() -> None:
    waits = {"decode-0": True, "decode-2": True, "decode-10": True, "decode-11": False}
    assert changes(WorkerRole.DECODE, 2, waits, ()) == ([], ["decode-10", "decode-2"])
    assert changes(WorkerRole.DECODE, 0, waits, ()) == ([], ["decode-10", "decode-2", "decode-0"])
    assert changes(WorkerRole.DECODE, 4, waits, ()) == ([], [])
