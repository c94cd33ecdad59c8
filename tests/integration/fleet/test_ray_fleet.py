"""Detached workers on an existing Ray: they outlive their driver, and the next driver adopts them."""

import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from baton.core.cluster.worker_report import WorkerRole
from baton.fleet.ray.actor_placement import WorkerFailed
from baton.fleet.ray.ray_connection import JoinedCluster
from baton.fleet.ray.ray_fleet import RayFleet
from baton.fleet.worker_plan import WorkerSpec
from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.process.process import with_parent_death_signal

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HEAD = """
import sys, ray
ray.init(address="local", include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=sys.argv[1])
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
ABSENT_SCHEDULER = "127.0.0.1:1"
"""Address of a scheduler that does not answer. A worker serves without one."""


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray on this machine that belongs to another process and ends with it."""
    directory = Path(tempfile.mkdtemp(prefix="bt-ray-", dir="/tmp"))  # a short path, for its sockets
    token = directory / "token"
    token.write_text(secrets.token_hex(32))
    with (
        pytest.MonkeyPatch.context() as environ
    ):  # Ray reads these variables when it is imported, here and in the other process
        environ.setenv("RAY_AUTH_MODE", "token")
        environ.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        environ.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = subprocess.Popen(
            with_parent_death_signal([sys.executable, "-c", HEAD, str(directory)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert head.stdout is not None
            yield head.stdout.readline().strip()
        finally:
            head.communicate()
            shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def driver(address: str, log_dir: Path, start_timeout_s: float = 120.0) -> AsyncIterator[RayFleet]:
    """The fleet of one `baton fleet --ray-address`."""
    joined = JoinedCluster(address=address, cluster="test", is_detached=True)
    fleet = RayFleet(ray_dir=log_dir, log_dir=log_dir, joined=joined, start_timeout_s=start_timeout_s)
    await fleet.connect()
    try:
        yield fleet
    finally:
        await fleet.close(grace_s=5.0)


def worker(worker_id: str, model: str = "demo") -> tuple[WorkerSpec, WorkerConfig]:
    config = WorkerConfig(
        worker_id=worker_id,
        model=model,
        device="emulated",
        transfer="local",
        kv_memory=64 * 2**20,
        max_model_len=4096,
        schedulers=(ABSENT_SCHEDULER,),
    )
    return WorkerSpec(worker_id=worker_id, role=WorkerRole.HYBRID), config


@pytest.mark.long
async def test_next_driver_adopts_a_running_worker_unchanged(ray_address: str, tmp_path: Path) -> None:
    async with driver(ray_address, tmp_path) as first:
        placed = await first.start(*worker("w0"))
    async with driver(ray_address, tmp_path, start_timeout_s=0.001) as hurried:
        with pytest.raises(WorkerFailed, match=r"w1 was not ready within 0.001 s.*worker-w1\.log.*fewer workers"):
            await hurried.start(*worker("w1"))
    assert psutil.pid_exists(placed.pid)
    async with driver(ray_address, tmp_path) as second:
        adopted = await second.start(*worker("w0"))
        assert adopted == placed
        w0 = second._workers["w0"]
        await second._call("stop it", lambda: w0.placement.actor.stop.remote())
        assert await w0._wait_until_ended() == ""
    async with driver(ray_address, tmp_path) as third:
        new = await third.start(*worker("w0"))
        assert new.worker_epoch != placed.worker_epoch, "a worker that has ended is not adopted"
        assert new.pid != placed.pid


@pytest.mark.long  # `make test` covers failed starts by test_up.py
async def test_worker_that_cannot_load_is_removed_before_the_next_attempt(ray_address: str, tmp_path: Path) -> None:
    import ray  # not at module level: it reads environment variables that `ray_address` sets

    model = tmp_path / "model"
    async with driver(ray_address, tmp_path) as fleet:
        with pytest.raises(WorkerFailed, match=r"w2 did not start: .*there is no such directory"):
            await fleet.start(*worker("w2", str(model)))
        model.symlink_to(DEMO_DIR)
        assert (await fleet.start(*worker("w2", str(model)))).worker_id == "w2"
        actor = fleet._workers["w2"].placement.actor
        await fleet.drain_unmanaged()
        assert await fleet._call("wait", lambda: ray.get(actor.wait.remote(0.1))) is None, "it is managed"
        del fleet._workers["w2"]  # as if the fleet were configured with fewer workers
        await fleet.drain_unmanaged()
        assert await fleet._call("wait", lambda: ray.get(actor.wait.remote(90.0))) == "", "it was drained"
