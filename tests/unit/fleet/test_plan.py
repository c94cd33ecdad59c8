"""Names, roles and cores of the workers that a configuration asks for."""

import pytest

from baton.fleet.plan import plan_workers, share_cores
from baton.runtime.settings import FleetConfig


def test_prefill_then_decode_then_hybrid() -> None:
    specs = plan_workers(FleetConfig(prefill=2, decode=1, hybrid=1), cores=[])
    assert [(s.worker_id, s.role.value) for s in specs] == [("w0", "prefill"), ("w1", "prefill"), ("w2", "decode"), ("w3", "hybrid")]


def test_on_a_cluster_of_others_a_name_stays_when_there_are_more_of_another_role() -> None:
    def names(prefill: int) -> list[str]:
        return [spec.worker_id for spec in plan_workers(FleetConfig(prefill=prefill, decode=2, ray_address="h:1"), cores=[])]

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
