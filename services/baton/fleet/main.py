"""`baton fleet`: the workers alone, for clusters whose gateway, scheduler and Redis are run by someone else."""

import asyncio
import os
from collections.abc import Callable

from baton.fleet.model_files import model_directory
from baton.fleet.plan import WorkerSpec, plan_workers
from baton.fleet.ray_fleet import Joined, RayFleet
from baton.fleet.run_dir import RunDir
from baton.runtime.config import derive
from baton.runtime.process import Stop, unless_stopped
from baton.runtime.settings import FleetConfig, WorkerConfig


async def serve(config: FleetConfig, stop: Stop, on_ready: Callable[[str], None]) -> None:
    """Keep the configured workers alive until `stop`.

    With `ray_address` the actors are detached: they outlive this driver, and the next one adopts those it finds; each node has the model,
    or fetches it. Without it they run on a Ray of our own and end with us, and a hub id is fetched once, before the first of them starts.
    Raises WorkerFailed when a worker does not start or keeps dying, NodesRefused when all nodes for it have another Baton.
    """
    run = RunDir()
    joined = None
    if config.ray_address is not None:
        joined = Joined(address=config.ray_address, cluster=config.cluster, placement=config.ray_placement, is_detached=True)
    fleet = RayFleet(ray_dir=run.path / "ray", log_dir=config.log_dir, joined=joined)
    cores = sorted(os.sched_getaffinity(0)) if config.ray_address is None and hasattr(os, "sched_getaffinity") else []
    specs = plan_workers(config, cores)

    async def serve_until_one_fails() -> None:
        model = config.model if config.ray_address is not None else await model_directory(config.model)
        await fleet.connect()
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(fleet.start(spec, worker_config(config, spec, len(specs), model)))
        await fleet.let_go_of_others()
        on_ready(config.ray_address or "local")
        await fleet.supervise()

    try:
        await unless_stopped(stop, serve_until_one_fails())
    finally:
        try:
            await fleet.close(config.drain_s)
        finally:
            await asyncio.to_thread(run.close)


def worker_config(config: FleetConfig, spec: WorkerSpec, num_workers: int, model: str) -> WorkerConfig:
    """The settings of one worker of the fleet; workers that share a machine share its memory and cores, which on a cluster of others are
    known only once it is placed. `model`: what it loads, which clients call as the fleet's settings say."""
    return derive(
        WorkerConfig,
        config,
        worker_id=spec.worker_id,
        role=spec.role.value,
        model=model,
        served_model_name=config.model_name,
        threads_per_worker=config.threads_per_worker or len(spec.cores) or (1 if config.ray_address is None else None),
        workers_on_host=num_workers,
    )
