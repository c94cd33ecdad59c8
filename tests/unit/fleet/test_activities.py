"""What a worker does while it starts, on its way to the lines of `baton up`."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.cluster.worker_report import WorkerRole
from baton.core.errors import ModelError
from baton.core.ids import WorkerRef
from baton.fleet.cluster import Cluster
from baton.fleet.ray.ray_fleet import RayFleet
from baton.fleet.ray.worker_actor import WorkerActor
from baton.fleet.worker_plan import WorkerSpec
from baton.runtime.config.settings import ClusterConfig, WorkerConfig
from baton.worker.device.gpu_start import Say
from baton.worker.device.worker_device import Device
from baton.worker.worker_thread import WorkerThread
from tests.unit.fleet.fake_ray import FakeConnection, FakeRay

CONFIG: dict[str, Any] = {"worker_id": "d0", "schedulers": ("127.0.0.1:9",)}


async def test_a_fleet_reports_each_activity_once_until_the_worker_is_ready(tmp_path: Path) -> None:
    ray = FakeRay(n1={"CPU": 4})
    ray.activities, ray.start_s = ("checks", "loads"), {"d0": 0.3}
    seen: list[tuple[str, str]] = []
    fleet = RayFleet(
        ray_dir=tmp_path,
        log_dir=None,
        connection=FakeConnection(ray),
        on_activity=lambda worker_id, text: seen.append((worker_id, text)),
    )
    await fleet.connect()
    spec = WorkerSpec(worker_id="d0", role=WorkerRole.DECODE, cores=(), gpu="")
    await fleet.start(spec, WorkerConfig(**CONFIG))
    assert seen == [("d0", "checks"), ("d0", "loads")]
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "follow-d0"]
    await fleet.close(1.0)


async def test_up_prints_what_a_worker_does(tmp_path: Path) -> None:
    lines: list[str] = []
    made: Any = Cluster(ClusterConfig(), SimpleNamespace(path=tmp_path), None, lines.append)  # type: ignore[arg-type]
    made._worker_began_s["d0"] = asyncio.get_running_loop().time() - 7.04
    made._report_activity("d0", "checks GPU kernels")
    (line,) = lines
    assert line.split() == ["worker", "d0", "checks", "GPU", "kernels", "7.0", "s"]
    made._supervision = asyncio.get_running_loop().create_future()
    made._report_activity("d0", "checks GPU kernels")
    assert len(lines) == 1, "a restart has a line of its own"


def test_a_worker_tells_what_it_does_until_its_start_has_ended() -> None:
    goes_on = threading.Event()

    def open_device(config: WorkerConfig, worker: WorkerRef, say: Say) -> Device:
        say("checks")
        assert goes_on.wait(60.0)
        say("loads")
        raise ModelError("no such model")

    def start() -> None:
        with pytest.raises(ModelError):
            thread.start()

    thread = WorkerThread(WorkerConfig(**CONFIG), open_device=open_device)
    starting = threading.Thread(target=start)
    starting.start()
    assert thread.activities(0, 60.0) == ["checks"]
    assert thread.activities(1, 0.01) == []
    goes_on.set()
    assert thread.activities(1, 60.0) == ["loads"]
    starting.join(60.0)
    assert thread.activities(2, 60.0) == [], "nothing is waited for after the start"


def test_an_actor_without_a_worker_does_nothing() -> None:
    assert WorkerActor((), gpu="").activities(0, 0.01) == []
