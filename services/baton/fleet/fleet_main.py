"""`baton fleet`: runs only the workers of a cluster. Gateway, scheduler and Redis are run separately."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from baton.core.cluster.worker_report import WorkerRole
from baton.fleet.local.local_plan import plan_local_workers
from baton.fleet.model_files import model_directory
from baton.fleet.processes.run_dir import RunDir
from baton.fleet.ray.fleet_worker import WorkerStage
from baton.fleet.ray.ray_connection import JoinedCluster
from baton.fleet.ray.ray_fleet import RayFleet
from baton.fleet.worker_plan import DesiredWorkers, WorkerSpec, max_workers_per_gpu, workers_by_role
from baton.runtime.config.config_base import derive
from baton.runtime.config.settings import FleetConfig, WorkerConfig
from baton.runtime.config.shared_settings import AdminSettings
from baton.runtime.logging import get_logger
from baton.runtime.network.addresses import join_address
from baton.runtime.observability.admin_http import AdminServer
from baton.runtime.observability.health import Health
from baton.runtime.observability.metrics import FleetMetrics, ProcessMetrics, process_registry
from baton.runtime.process.awake_clock import AwakeClock
from baton.runtime.process.process import Background, Stop, unless_stopped

log = get_logger(__name__)


async def serve(
    config: FleetConfig,
    stop: Stop,
    on_ready: Callable[[str], None],
    *,
    make_run_dir: Callable[[], RunDir] = RunDir,
    make_fleet: Callable[..., RayFleet] = RayFleet,
    find_model: Callable[[str], Awaitable[str]] = model_directory,
) -> None:
    """Keep the configured workers alive until `stop`.

    With `ray_address`, workers are detached actors of an existing Ray cluster: they outlive this driver, and
    the next driver adopts them. Each node has the model or downloads it. A worker without a node, or one that
    keeps dying, is retried as long as this runs.

    Without `ray_address`, workers run on a private Ray and end with this process. A hub id is downloaded
    once, before the first worker starts. Raises ConfigError if the machine has too little memory for all
    workers, and WorkerFailed if a worker does not start or keeps dying.

    RayFailed is raised if Ray cannot be reached. All these errors arrive in an ExceptionGroup. The keyword
    arguments are replaced in tests.
    """
    registry, health = process_registry("fleet"), Health("ray")
    metrics = FleetMetrics(registry)
    async with AsyncExitStack() as stack:
        run = make_run_dir()
        stack.push_async_callback(asyncio.to_thread, run.close)
        fleet = make_fleet(
            ray_dir=run.path / "ray",
            log_dir=config.log_dir,
            joined=_joined_cluster(config),
            memory_limit=config.ray_memory_limit,
            start_timeout_s=config.worker_start_s,
        )
        if config.admin_port is not None:
            admin = AdminServer(health, registry, lambda: update_metrics(metrics, fleet))
            port = admin.start(config.host, config.admin_port)
            stack.push_async_callback(admin.stop)
            log.info("admin_started", address=join_address(config.host, port))
        stack.push_async_callback(fleet.close, config.drain_s)

        def ready() -> None:
            health.ready("ray")
            on_ready(config.ray_address or "local")

        async with Background(AwakeClock(asyncio.get_running_loop().time).run(ProcessMetrics(registry).observe_loop)):
            if config.ray_address is None:
                work = _serve_on_private_ray(config, fleet, ready, find_model)
            else:
                work = _serve_on_existing_ray(config, fleet, ready)
            await unless_stopped(stop, work)
        health.drain()


def update_metrics(metrics: FleetMetrics, fleet: RayFleet) -> None:
    """Set the gauges to the current number of workers by role and stage."""
    for role in WorkerRole:
        for stage in WorkerStage:
            metrics.workers.labels(role.value, stage.value).set(fleet.stages.get((role, stage), 0))


def worker_config(
    config: FleetConfig, spec: WorkerSpec, num_workers: int, model: str, *, workers_on_gpu: int = 1
) -> WorkerConfig:
    """Return the settings of one worker of the fleet.

    num_workers: number of workers that share this machine's memory and cores. On an existing Ray cluster it
        is corrected once the worker has a node.
    model: what the worker loads. Its public name comes from `config`.
    workers_on_gpu: number of workers that share its GPU; 1 if Ray assigns GPUs.
    """
    return derive(
        WorkerConfig,
        config,
        host=AdminSettings.host,  # the fleet's own listening address does not apply to workers
        admin_port=None,
        worker_id=spec.worker_id,
        role=spec.role.value,
        model=model,
        served_model_name=config.model_name,
        threads_per_worker=config.threads_per_worker or len(spec.cores) or None,
        workers_on_host=num_workers,
        workers_on_gpu=workers_on_gpu,
    )


def _joined_cluster(config: FleetConfig) -> JoinedCluster | None:
    if config.ray_address is None:
        return None
    return JoinedCluster(
        address=config.ray_address, cluster=config.cluster, placement=config.ray_placement, is_detached=True
    )


async def _serve_on_private_ray(
    config: FleetConfig,
    fleet: RayFleet,
    ready: Callable[[], None],
    find_model: Callable[[str], Awaitable[str]],
) -> None:
    model = await find_model(config.model)
    await fleet.connect()
    specs = await plan_local_workers(config)
    workers_on_gpu = max_workers_per_gpu(specs)
    async with asyncio.TaskGroup() as group:
        for spec in specs:
            settings = worker_config(config, spec, len(specs), model, workers_on_gpu=workers_on_gpu)
            group.create_task(fleet.start(spec, settings))
    ready()
    await fleet.supervise()


async def _serve_on_existing_ray(config: FleetConfig, fleet: RayFleet, ready: Callable[[], None]) -> None:
    await fleet.connect()
    ready()
    minimum = workers_by_role(config)
    num_workers = sum(minimum.values())
    await fleet.reconcile(
        DesiredWorkers(
            minimum=minimum,
            scale_with_nodes=config.scale_with_nodes,
            config_of=lambda spec: worker_config(config, spec, num_workers, config.model),
        )
    )
