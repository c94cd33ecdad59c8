"""Workers of this machine: what they are to have together must be there."""

from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.fleet.local import local_gpus, local_plan
from baton.fleet.local.local_plan import plan_here
from baton.runtime.config.settings import ClusterConfig, FleetConfig

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores and 10 GiB are free; there is no GPU, and no driver of one."""
    monkeypatch.setattr(local_plan, "pinnable_cores", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(local_plan, "core_quota", lambda: None)
    monkeypatch.setattr(local_plan, "free_host_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(local_plan, "local_gpus", lambda device: [])
    monkeypatch.setattr(local_gpus, "DRIVER", Path("/nowhere"))


@pytest.mark.parametrize("device", ["cpu", "emulated", "auto"])
@pytest.mark.parametrize("kind", [ClusterConfig, FleetConfig])
async def test_kv_of_all_workers_on_the_cpu_must_be_free(
    kind: type[ClusterConfig] | type[FleetConfig], device: str
) -> None:
    assert len(await plan_here(kind(device=device, decode=1, kv_memory=5 * GIB))) == 2
    refused = "--kv-memory 5GiB for each of 3 workers is 15360 MiB, more than the 10240 MiB that are free here: give less than 3413MiB"
    with pytest.raises(ConfigError, match=refused):
        await plan_here(kind(device=device, decode=2, kv_memory=5 * GIB))
    assert len(await plan_here(kind(device=device, decode=2))) == 3


@pytest.mark.parametrize(
    ("device", "found", "driver"),
    [("cuda", [], "/nowhere"), ("auto", ["GPU-0"], "/nowhere"), ("auto", [], "/dev/null")],
)
async def test_kv_of_gpus_needs_no_host_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, found: list[str], driver: str
) -> None:
    """Also of those that nothing lists."""
    monkeypatch.setattr(local_plan, "local_gpus", lambda device: found)
    monkeypatch.setattr(local_gpus, "DRIVER", Path(driver))
    assert len(await plan_here(ClusterConfig(device=device, kv_memory=60 * GIB))) == 2


@pytest.mark.parametrize(("quota", "cores"), [(None, [(0, 1), (2, 3)]), (4.0, [(0, 1), (2, 3)]), (3.5, [(), ()])])
async def test_workers_are_pinned_only_where_the_cores_are_theirs(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: list[tuple[int, ...]]
) -> None:
    """Containers that share a machine would all take its first cores."""
    monkeypatch.setattr(local_plan, "core_quota", lambda: quota)
    assert [spec.cores for spec in await plan_here(ClusterConfig())] == cores
