"""A fleet that looks after its workers while a test runs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.core.cluster.worker_report import WorkerRole
from baton.fleet.processes.supervisor import RestartLimit
from baton.fleet.ray.ray_fleet import Joined, RayFleet
from baton.fleet.worker_plan import Wanted, WorkerSpec
from baton.runtime.config.settings import RayPlacement, WorkerConfig
from tests.unit.fleet.fake_ray import FakeActor, FakeRay

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
QUICK = RestartLimit(deaths=2, window_s=0.2, first_wait_s=0.001, max_wait_s=0.001)

Use = Callable[[FakeRay], FakeRay]


async def connected(
    tmp_path: Path, *, is_detached: bool = True, placement: RayPlacement = "role", limit: RestartLimit = QUICK
) -> RayFleet:
    joined = Joined(address="h:1", cluster="test", placement=placement, is_detached=is_detached)
    fleet = RayFleet(ray_dir=tmp_path, log_dir=None, joined=joined, limit=limit)
    await fleet.connect()
    return fleet


def wanted(*, follows_places: bool = False, prefill: int = 1, decode: int = 1) -> Wanted:
    return Wanted(least={P: prefill, D: decode}, follows_places=follows_places, config_of=worker_config)


def worker_config(spec: WorkerSpec) -> WorkerConfig:
    return WorkerConfig(worker_id=spec.worker_id, role=spec.role.value)


@asynccontextmanager
async def keeping(
    tmp_path: Path, wanted: Wanted, placement: RayPlacement = "role", limit: RestartLimit = QUICK
) -> AsyncIterator[RayFleet]:
    """A fleet that looks after these; it must still do so when the test ends."""
    fleet = await connected(tmp_path, placement=placement, limit=limit)
    task = asyncio.create_task(fleet.keep(wanted))
    try:
        yield fleet
        assert not task.done()
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        await fleet.close(1.0)
        if not isinstance(ended, asyncio.CancelledError):
            raise ended


async def for_a_while() -> None:
    """Many looks long."""
    await asyncio.sleep(0.1)


def left_behind(ray: FakeRay, worker_id: str, **options: Any) -> FakeActor:
    """An actor that an earlier driver made."""
    actor: FakeActor = ray.remote(FakeActor).options(name=f"worker-{worker_id}", **options).remote()
    if actor.node:
        actor.starts.append({"worker_id": worker_id})
    return actor
