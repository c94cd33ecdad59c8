"""A fleet over a fake Ray, with short intervals."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.core.cluster.worker_report import WorkerRole
from baton.fleet.processes.restart_policy import RestartLimit
from baton.fleet.ray.actor_placement import PlacementTimes
from baton.fleet.ray.ray_connection import JoinedCluster
from baton.fleet.ray.ray_fleet import RayFleet
from baton.fleet.worker_plan import DesiredWorkers, WorkerSpec
from baton.runtime.config.fleet_settings import RayPlacement
from baton.runtime.config.settings import WorkerConfig
from tests.unit.fleet.fake_ray import FakeActor, FakeConnection, FakeRay

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
QUICK_LIMIT = RestartLimit(deaths=2, window_s=0.2, first_wait_s=0.001, max_wait_s=0.001)
QUICK_TIMES = PlacementTimes(
    refresh_interval_s=0.005, report_after_s=0.02, report_interval_s=0.05, adopt_timeout_s=60.0
)
NOT_ANSWERED_S = 0.05
"""Timeout for actors that do not answer. Others answer at once, but the event loop may be late."""


async def connected(
    ray: FakeRay,
    tmp_path: Path,
    *,
    is_detached: bool = True,
    placement: RayPlacement = "role",
    limit: RestartLimit = QUICK_LIMIT,
    left_behind_timeout_s: float = 60.0,
    fleet_class: type[RayFleet] = RayFleet,
    notify: Callable[[str], None] = lambda text: None,
    **times: float,
) -> RayFleet:
    """A fleet that has joined `ray`. `times`: changes to the quick placement times."""
    fleet = fleet_class(
        ray_dir=tmp_path,
        log_dir=None,
        joined=JoinedCluster(address="h:1", cluster="test", placement=placement, is_detached=is_detached),
        limit=limit,
        connection=FakeConnection(ray),
        placement_times=replace(QUICK_TIMES, **times),
        left_behind_timeout_s=left_behind_timeout_s,
        notify=notify,
    )
    await fleet.connect()
    return fleet


def desired(*, scale_with_nodes: bool = False, prefill: int = 1, decode: int = 1) -> DesiredWorkers:
    return DesiredWorkers(minimum={P: prefill, D: decode}, scale_with_nodes=scale_with_nodes, config_of=worker_config)


def worker_config(spec: WorkerSpec) -> WorkerConfig:
    return WorkerConfig(worker_id=spec.worker_id, role=spec.role.value)


@asynccontextmanager
async def reconciling(ray: FakeRay, tmp_path: Path, workers: DesiredWorkers, **options: Any) -> AsyncIterator[RayFleet]:
    """A fleet that reconciles these workers in the background.

    It must still do so at the end of the block.
    """
    fleet = await connected(ray, tmp_path, **options)
    task = asyncio.create_task(fleet.reconcile(workers))
    try:
        yield fleet
        assert not task.done()
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        await fleet.close(1.0)
        if not isinstance(ended, asyncio.CancelledError):
            raise ended


async def many_refreshes() -> None:
    """Sleep for many refresh intervals."""
    await asyncio.sleep(0.1)


def left_behind(ray: FakeRay, worker_id: str, **options: Any) -> FakeActor:
    """An actor that an earlier driver created."""
    actor: FakeActor = ray.remote(FakeActor).options(name=f"worker-{worker_id}", **options).remote()
    if actor.node:
        actor.starts.append({"worker_id": worker_id})
    return actor
