"""Workers of this machine: their cores, and their KV memory together must fit."""

from dataclasses import replace

import pytest

from baton.core.errors import ConfigError
from baton.fleet.local.local_plan import LocalHost, plan_local_workers, plan_workers_on
from baton.runtime.config.settings import ClusterConfig, FleetConfig

GIB = 2**30
HOST = LocalHost(cores=(0, 1, 2, 3), quota=None, free_bytes=10 * GIB, gpus=(), has_gpu_driver=False)


@pytest.mark.parametrize("device", ["cpu", "emulated", "auto"])
@pytest.mark.parametrize("kind", [ClusterConfig, FleetConfig])
def test_kv_memory_of_all_cpu_workers_must_be_free(kind: type[ClusterConfig] | type[FleetConfig], device: str) -> None:
    assert len(plan_workers_on(HOST, kind(device=device, decode=1, kv_memory=5 * GIB))) == 2
    message = (
        "--kv-memory 5GiB for each of 3 workers is 15360 MiB, but only 10240 MiB are free: set it well below 3413MiB"
    )
    with pytest.raises(ConfigError, match=message):
        plan_workers_on(HOST, kind(device=device, decode=2, kv_memory=5 * GIB))
    assert len(plan_workers_on(HOST, kind(device=device, decode=2))) == 3


@pytest.mark.parametrize(
    ("device", "gpus", "has_gpu_driver"), [("cuda", (), False), ("auto", ("GPU-0",), False), ("auto", (), True)]
)
def test_kv_memory_of_gpu_workers_needs_no_host_memory(
    device: str, gpus: tuple[str, ...], has_gpu_driver: bool
) -> None:
    """The last case: a driver exists, but no tool lists the GPUs."""
    host = replace(HOST, gpus=gpus, has_gpu_driver=has_gpu_driver)
    assert len(plan_workers_on(host, ClusterConfig(device=device, kv_memory=60 * GIB))) == 2


@pytest.mark.parametrize(("quota", "cores"), [(None, [(0, 1), (2, 3)]), (4.0, [(0, 1), (2, 3)]), (3.5, [(), ()])])
def test_workers_are_pinned_only_without_a_smaller_cpu_quota(quota: float | None, cores: list[tuple[int, ...]]) -> None:
    """Otherwise containers that share a machine would all pin to its first cores."""
    assert [spec.cores for spec in plan_workers_on(replace(HOST, quota=quota), ClusterConfig())] == cores


async def test_workers_are_planned_for_the_machine_that_runs_the_test() -> None:
    specs = await plan_local_workers(ClusterConfig(device="cpu", decode=2))
    assert [spec.worker_id for spec in specs] == ["w0", "w1", "w2"]
