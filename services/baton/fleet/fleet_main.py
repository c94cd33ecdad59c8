"""`baton fleet`: the workers alone, for clusters whose gateway, scheduler and Redis are run by someone
else."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from baton.core.cluster.worker_report import WorkerRole
from baton.fleet.local.local_plan import plan_here
from baton.fleet.model_files import model_directory
from baton.fleet.processes.run_dir import RunDir
from baton.fleet.ray.ray_fleet import Joined, RayFleet, Stage
from baton.fleet.worker_plan import Wanted, WorkerSpec, least_workers, most_on_a_gpu
from baton.runtime.config.config_base import derive
from baton.runtime.config.settings import AdminSettings, FleetConfig, WorkerConfig
from baton.runtime.logging import get_logger
from baton.runtime.network.addresses import join_address
from baton.runtime.observability.admin_http import AdminServer
from baton.runtime.observability.health import Health
from baton.runtime.observability.metrics import FleetMetrics, ProcessMetrics, process_registry
from baton.runtime.process.process import Background, Stop, unless_stopped, watch_loop_lag

log = get_logger(__name__)


async def serve(config: FleetConfig, stop: Stop, on_ready: Callable[[str], None]) -> None:
    """Keep the configured workers alive until `stop`.

    With `ray_address` the actors are detached: they outlive this driver, and the next one adopts those it
    finds; each node has the model, or fetches it. A worker that has no node, or keeps dying, is tried again
    for as long as this runs, and the others are looked after meanwhile. Without it they run on a Ray of our
    own and end with us, a hub id is fetched once, before the first of them starts, ConfigError is raised if
    this machine has no memory for all of them, and WorkerFailed when a worker does not start or keeps dying.
    Those, and RayFailed where Ray cannot be reached, leave in an ExceptionGroup.
    """
    registry, health = process_registry("fleet"), Health("ray")
    metrics = FleetMetrics(registry)
    async with AsyncExitStack() as stack:
        run = RunDir()
        stack.push_async_callback(asyncio.to_thread, run.close)
        joined = None
        if config.ray_address is not None:
            joined = Joined(
                address=config.ray_address, cluster=config.cluster, placement=config.ray_placement, is_detached=True
            )
        fleet = RayFleet(
            ray_dir=run.path / "ray", log_dir=config.log_dir, joined=joined, start_limit_s=config.worker_start_s
        )
        if config.admin_port is not None:
            admin = AdminServer(health, registry, lambda: refresh(metrics, fleet))
            port = admin.start(config.host, config.admin_port)
            stack.push_async_callback(admin.stop)
            log.info("admin_started", address=join_address(config.host, port))
        stack.push_async_callback(fleet.close, config.drain_s)
        ready = _ready(config, health, on_ready)
        async with Background(watch_loop_lag(ProcessMetrics(registry).observe_loop)):
            await unless_stopped(
                stop, _serve_alone(config, fleet, ready) if joined is None else _serve_detached(config, fleet, ready)
            )
        health.drain()


def refresh(metrics: FleetMetrics, fleet: RayFleet) -> None:
    """Gauges as the fleet is now."""
    for role in WorkerRole:
        for stage in Stage:
            metrics.workers.labels(role.value, stage.value).set(fleet.stages.get((role, stage), 0))


def worker_config(
    config: FleetConfig, spec: WorkerSpec, num_workers: int, model: str, *, on_gpu: int = 1
) -> WorkerConfig:
    """The settings of one worker of the fleet; workers that share a machine share its memory and cores, which
    on a cluster of others are known only once it is placed. `on_gpu`: how many share its GPU; where Ray gives
    them out, each is of one worker. `model`: what it loads, which clients call as the fleet's settings
    say."""
    return derive(
        WorkerConfig,
        config,
        host=AdminSettings.host,  # where the fleet listens is its own; a worker's is that of its node
        admin_port=None,
        worker_id=spec.worker_id,
        role=spec.role.value,
        model=model,
        served_model_name=config.model_name,
        threads_per_worker=config.threads_per_worker or len(spec.cores) or None,
        workers_on_host=num_workers,
        workers_on_gpu=on_gpu,
    )


def _ready(config: FleetConfig, health: Health, on_ready: Callable[[str], None]) -> Callable[[], None]:
    def ready() -> None:
        health.ready("ray")
        on_ready(config.ray_address or "local")

    return ready


async def _serve_alone(config: FleetConfig, fleet: RayFleet, ready: Callable[[], None]) -> None:
    model = await model_directory(config.model)
    await fleet.connect()
    specs = await plan_here(config)
    on_gpu = most_on_a_gpu(specs)
    async with asyncio.TaskGroup() as group:
        for spec in specs:
            group.create_task(fleet.start(spec, worker_config(config, spec, len(specs), model, on_gpu=on_gpu)))
    ready()
    await fleet.supervise()


async def _serve_detached(config: FleetConfig, fleet: RayFleet, ready: Callable[[], None]) -> None:
    await fleet.connect()
    ready()
    least = least_workers(config)
    num_workers = sum(least.values())
    await fleet.keep(
        Wanted(
            least=least,
            follows_places=config.scale_with_nodes,
            config_of=lambda spec: worker_config(config, spec, num_workers, config.model),
        )
    )
