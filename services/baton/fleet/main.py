"""`baton fleet`: the workers alone, for clusters whose gateway, scheduler and Redis are run by someone else."""

import asyncio
import os
from collections.abc import Callable

from baton.fleet.plan import WorkerSpec, plan_workers
from baton.fleet.ray_fleet import RayFleet
from baton.fleet.run_dir import RunDir
from baton.runtime.config import derive
from baton.runtime.logging import get_logger
from baton.runtime.process import Stop
from baton.runtime.settings import FleetConfig, WorkerConfig

log = get_logger(__name__)


async def serve(config: FleetConfig, stop: Stop, on_ready: Callable[[str], None]) -> None:
    """Keep the configured workers alive until `stop`.

    With `ray_address` the actors are detached: they outlive this driver, and the next one adopts those it finds. Without it they run
    on a Ray of our own and end with us. Raises WorkerFailed when a worker does not start or keeps dying.
    """
    run = RunDir()
    fleet = RayFleet(
        ray_dir=run.path / "ray", ray_address=config.ray_address, log_dir=config.log_dir, detached=config.ray_address is not None
    )
    cores = sorted(os.sched_getaffinity(0)) if config.ray_address is None and hasattr(os, "sched_getaffinity") else []
    specs = plan_workers(config, cores)
    try:
        await fleet.connect()
        await asyncio.gather(*(fleet.start(spec, worker_config(config, spec, len(specs))) for spec in specs))
        on_ready(config.ray_address or "local")
        supervision = asyncio.create_task(fleet.supervise())
        stopped = asyncio.create_task(stop.drain.wait())
        try:
            await asyncio.wait((supervision, stopped), return_when=asyncio.FIRST_COMPLETED)
            if supervision.done():
                supervision.result()
        finally:
            for task in (supervision, stopped):
                task.cancel()
            await asyncio.gather(supervision, stopped, return_exceptions=True)
    finally:
        await fleet.close(config.drain_s)
        await asyncio.to_thread(run.close)


def worker_config(config: FleetConfig, spec: WorkerSpec, num_workers: int) -> WorkerConfig:
    """The settings of one worker of the fleet; workers that share a machine share its memory and cores."""
    return derive(
        WorkerConfig,
        config,
        worker_id=spec.worker_id,
        role=spec.role.value,
        threads_per_worker=config.threads_per_worker or max(1, len(spec.cores)),
        workers_on_host=num_workers,
    )
