"""Workers on a Ray that somebody else runs: they outlive the driver that placed them, and the next one adopts
them."""

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
from baton.fleet.ray.ray_calls import the_ray
from baton.fleet.ray.ray_fleet import Joined, RayFleet, WorkerFailed
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
NOBODY = "127.0.0.1:1"
"""A scheduler that does not answer: a worker serves without."""


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray of this machine that belongs to another process, whose end ends it."""
    directory = Path(tempfile.mkdtemp(prefix="bt-ray-", dir="/tmp"))  # a short path, for its sockets
    token = directory / "token"
    token.write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as environ:  # Ray reads these when it is imported, by us as by the other process
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
async def driver(address: str, log_dir: Path) -> AsyncIterator[RayFleet]:
    """What one `baton fleet --ray-address` has of Ray."""
    fleet = RayFleet(ray_dir=log_dir, log_dir=log_dir, joined=Joined(address=address, cluster="test", is_detached=True))
    await fleet.connect()
    try:
        yield fleet
    finally:
        await fleet.close(grace_s=5.0)


def worker(worker_id: str, model: str = "demo") -> tuple[WorkerSpec, WorkerConfig]:
    config = WorkerConfig(
        worker_id=worker_id,
        model=model,
        transfer="local",
        kv_memory=64 * 2**20,
        max_model_len=4096,
        schedulers=(NOBODY,),
    )
    return WorkerSpec(worker_id=worker_id, role=WorkerRole.HYBRID), config


@pytest.mark.long
async def test_the_next_driver_adopts_a_worker_as_it_is(ray_address: str, tmp_path: Path) -> None:
    async with driver(ray_address, tmp_path) as first:
        placed = await first.start(*worker("w0"))
        first._start_limit_s = 0.001
        with pytest.raises(WorkerFailed, match=r"w1 was not ready within 0.001 s.*worker-w1\.log.*fewer workers"):
            await first.start(*worker("w1"))
    assert psutil.pid_exists(placed.pid)
    async with driver(ray_address, tmp_path) as second:
        adopted = await second.start(*worker("w0"))
        assert adopted == placed
        await second._call("end it", lambda: second._workers["w0"].place.actor.stop.remote())
        assert await second._until_ended(second._workers["w0"]) == ""
    async with driver(ray_address, tmp_path) as third:
        new = await third.start(*worker("w0"))
        assert new.worker_epoch != placed.worker_epoch, "one that has ended is no worker to adopt"
        assert new.pid != placed.pid


async def test_a_worker_that_could_not_load_makes_room_for_the_next_try(ray_address: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    async with driver(ray_address, tmp_path) as fleet:
        with pytest.raises(WorkerFailed, match=r"w2 did not start: .*there is no such directory"):
            await fleet.start(*worker("w2", str(model)))
        model.symlink_to(DEMO_DIR)
        assert (await fleet.start(*worker("w2", str(model)))).worker_id == "w2"
        actor = fleet._workers["w2"].place.actor
        await fleet.let_go_of_others()
        assert await fleet._call("wait", lambda: the_ray().get(actor.wait.remote(0.1))) is None, "it is wanted"
        del fleet._workers["w2"]  # as a fleet is that was told to have fewer
        await fleet.let_go_of_others()
        assert await fleet._call("wait", lambda: the_ray().get(actor.wait.remote(20.0))) == "", "it was drained"
