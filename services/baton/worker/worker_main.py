"""`baton worker`: runs one worker.

Opens the device, the gRPC server, Redis and the admin port, and builds the `Worker` on them.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry

from baton.core.errors import ConfigError
from baton.core.ids import WorkerRef
from baton.core.interfaces import CostStore, Duplex, KvEventFeed, Membership
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.jobs import ReceivedGatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.core.step_cost import StepCostModel
from baton.engine.state.step import DeviceFault
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_tls import between_services
from baton.rpc.streams.stream_limits import stream_limits
from baton.runtime import failpoints
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.runtime.memory.garbage_collection import frozen_heap
from baton.runtime.network.addresses import advertised_host, join_address
from baton.runtime.observability.admin_http import AdminServer
from baton.runtime.observability.health import Health
from baton.runtime.observability.metrics import BudgetMetrics, ProcessMetrics, process_registry
from baton.runtime.observability.open_tracing import open_tracing
from baton.runtime.observability.tracing import Tracing
from baton.runtime.process.awake_clock import AwakeClock
from baton.runtime.process.byte_budget import ByteBudget
from baton.runtime.process.drain_socket import DrainSocket
from baton.runtime.process.process import Background, Stop
from baton.store.memory.memory_stores import MemoryCostStore, MemoryMembership
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_cost_store import RedisCostStore
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_kv_event_feed import RedisKvEventFeed
from baton.store.redis.redis_membership import RedisMembership
from baton.worker.costs.measure_costs import measure_costs, measurement_lock, measurement_lock_path
from baton.worker.costs.step_cost_keeper import known_or_measured
from baton.worker.costs.targets_summary import targets_summary
from baton.worker.device.gpu_start import Say
from baton.worker.device.open_device import open_device
from baton.worker.device.worker_device import Device, DraftDevice
from baton.worker.worker_budget import worker_budget
from baton.worker.worker_metrics import MeteredExecutor, WorkerMetrics
from baton.worker.worker_parts import WorkerParts
from baton.worker.worker_service import Worker, WorkerUnhealthy
from baton.worker.worker_vllm_metrics import WorkerVllmMetrics

log = get_logger(__name__)

STREAM_CLOSE_GRACE_S = 1.0
"""Time that the gRPC server gives closed streams to end cleanly."""
UNHEALTHY_EXIT_CODE = 70
"""`EX_SOFTWARE`: tells the supervisor to start a new process."""

OpenDevice = Callable[[WorkerConfig, WorkerRef, Say], Device]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """Describes a started worker.

    `summary` is one line about its device; `start_s` is how long the start took.
    """

    worker: WorkerRef
    host: str
    summary: str
    start_s: float


class StartupGate:
    """Implements `WorkerService` from the moment the port is bound.

    Closes every stream until `worker` is set.
    """

    def __init__(self) -> None:
        self.worker: Worker | None = None

    async def session(self, stream: Duplex[WorkerMessage, ReceivedGatewayMessage]) -> None:
        await (self.worker.session(stream) if self.worker else stream.aclose())

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        await (self.worker.peer(stream) if self.worker else stream.aclose())

    async def copy_prefix(self, stream: Duplex[PrefixReply, PrefixRequest]) -> None:
        await (self.worker.copy_prefix(stream) if self.worker else stream.aclose())


async def serve(
    config: WorkerConfig,
    stop: Stop,
    on_ready: Callable[[str], None],
    exit_now: Callable[[int], None] = os._exit,
    open_device: OpenDevice = open_device,
) -> None:
    """Run a worker as the only work of this process, then end the process.

    `on_ready` gets the worker's address. The process ends through `exit_now`, without interpreter shutdown:
    after torch is loaded, that takes a second or more, and the thread of a failed device may be stuck for
    ever.
    """
    code = 0
    try:
        await run_worker(config, stop, lambda ready: on_ready(ready.worker.address), open_device)
    except WorkerUnhealthy:
        code = UNHEALTHY_EXIT_CODE
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(code)


async def run_worker(
    config: WorkerConfig,
    stop: Stop,
    on_ready: Callable[[WorkerReady], None],
    open_device: OpenDevice = open_device,
    say: Say = lambda text: None,
) -> bool:
    """Start a worker and serve until it is drained. Returns True if its machine is shutting down.

    say: told what takes long in the start, from any thread. Raises ConfigError or ModelError if it cannot
    start, WorkerUnhealthy if it must not go on. An unhealthy device is not closed, because it may never
    answer.
    """
    if config.redis_url is None and not config.schedulers:
        raise ConfigError(
            "the worker has no scheduler to report to: set --schedulers HOST:PORT,... or --redis-url, where schedulers "
            "announce themselves"
        )
    started_s = asyncio.get_running_loop().time()
    rng = Random()
    worker_id = config.worker_id or f"worker-{rng.getrandbits(32):08x}"
    failpoints.identify(worker=worker_id, role=config.role)
    observed, gate = _Observability.create(), StartupGate()
    budget = worker_budget(config.memory_budget)
    BudgetMetrics(observed.registry).follow(budget)
    async with AsyncExitStack() as stack:
        drain_socket = _drain_socket(config, worker_id, gate)
        if drain_socket is not None:
            # Stopped last: a client that waits at the socket must not be released before the worker has ended.
            stack.push_async_callback(drain_socket.stop)
        port = await _start_grpc_server(config, gate, observed.health, budget, stack)
        admin_port = _start_admin_server(config, observed, gate, stack)
        ref = WorkerRef(
            worker_id=worker_id,
            worker_epoch=rng.getrandbits(64),
            address=join_address(advertised_host(config.host, config.advertise_host), port),
        )
        observed.metrics.identify(ref, config.role)
        tracing = _open_tracing(config, ref, observed, stack)
        device = await asyncio.to_thread(open_device, config, ref, say)
        stack.push_async_callback(_close_healthy_device, device, observed.health)
        worker = await _build_worker(config, ref, device, observed, tracing, rng, budget, admin_port, stack)
        gate.worker = worker
        if drain_socket is not None:
            await drain_socket.start()
        ready = _ready(ref, device, config, worker.step_costs, started_s)
        stack.enter_context(frozen_heap())
        observed.health.ready("model")
        await _run_until_drained(worker, stop, observed, lambda: on_ready(ready))
        return worker.node_shutting_down


async def initial_step_costs(
    device: Device | DraftDevice | None, store: CostStore, health: Health, lock_path: Path | None = None
) -> StepCostModel | None:
    """Return the step costs that a worker starts with, or None if they are unknown, or without a device.

    Known costs of the device come first, then costs that an earlier worker of the same kind stored. Otherwise
    they are measured now, while no other worker of this host measures. Raises WorkerUnhealthy if the device
    fails.
    """
    if device is None or device.costs is not None or not device.costs_key:
        return None if device is None else device.costs

    async def measure_exclusively() -> StepCostModel | None:
        async with measurement_lock(lock_path or measurement_lock_path()):
            # A worker of the same kind may have measured and stored costs while this one waited for the lock.
            return await known_or_measured(
                store, device.costs_key, lambda: measure_costs(device.executor, device.engine_config, device.pool)
            )

    try:
        return await known_or_measured(store, device.costs_key, measure_exclusively)
    except DeviceFault as error:
        health.fail(str(error))
        raise WorkerUnhealthy(f"the device failed while step costs were measured: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observability:
    """Health, metrics and stalls of the worker process."""

    registry: CollectorRegistry
    health: Health
    metrics: WorkerMetrics
    process_metrics: ProcessMetrics
    awake_clock: AwakeClock

    @classmethod
    def create(cls) -> "_Observability":
        registry = process_registry("worker")
        return cls(
            registry=registry,
            health=Health("model"),
            metrics=WorkerMetrics(registry),
            process_metrics=ProcessMetrics(registry),
            awake_clock=AwakeClock(asyncio.get_running_loop().time),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stores:
    """Stores that processes share. `feed` is None without Redis."""

    membership: Membership
    feed: KvEventFeed | None
    costs: CostStore


async def _start_grpc_server(
    config: WorkerConfig, gate: StartupGate, health: Health, budget: ByteBudget, stack: AsyncExitStack
) -> int:
    """Start the gRPC server and return its port. It stops as soon as the worker is unhealthy.

    Gateways that dial an unhealthy worker are then refused, as if the process had died, and place elsewhere.
    """
    server = GrpcServer(heartbeat_s=config.heartbeat_s, limits=stream_limits(budget), tls=between_services(config))
    server.add_worker(gate)
    server.follow(health)
    port = await server.start(config.host, config.rpc_port)
    stack.push_async_callback(server.stop, STREAM_CLOSE_GRACE_S)
    stopping: list[asyncio.Task[None]] = []

    def stop_if_unhealthy(changed: Health) -> None:
        if not changed.is_alive and not stopping:
            stopping.append(asyncio.get_running_loop().create_task(server.stop(0.0), name="stop-grpc"))

    health.on_change(stop_if_unhealthy)
    return port


def _start_admin_server(
    config: WorkerConfig, observed: _Observability, gate: StartupGate, stack: AsyncExitStack
) -> int | None:
    """Serve metrics and health over HTTP if `admin_port` is set. Return the port."""
    if config.admin_port is None:
        return None

    def refresh() -> None:
        if gate.worker is not None:
            observed.metrics.refresh(gate.worker)

    def layout() -> KvLayout | None:
        return None if gate.worker is None else gate.worker.layout

    if config.vllm_metric_names:
        names = WorkerVllmMetrics(config.model_name, observed.metrics.engine, layout)
        names.follow(observed.registry)
    server = AdminServer(observed.health, observed.registry, refresh)
    port = server.start(config.host, config.admin_port)
    stack.push_async_callback(server.stop)
    log.info("admin_started", address=join_address(config.host, port))
    return port


def _open_tracing(config: WorkerConfig, ref: WorkerRef, observed: _Observability, stack: AsyncExitStack) -> Tracing:
    tracing = open_tracing(
        config,
        observed.process_metrics,
        "worker",
        ref.worker_id,
        {"baton.role": config.role, "baton.worker_epoch": f"{ref.worker_epoch:016x}"},
    )
    stack.push_async_callback(tracing.aclose)
    return tracing


async def _build_worker(
    config: WorkerConfig,
    ref: WorkerRef,
    device: Device,
    observed: _Observability,
    tracing: Tracing,
    rng: Random,
    budget: ByteBudget,
    admin_port: int | None,
    stack: AsyncExitStack,
) -> Worker:
    network = GrpcNetwork(
        heartbeat_s=config.heartbeat_s,
        limits=stream_limits(budget),
        tls=between_services(config),
        awake_clock=observed.awake_clock,
    )
    stack.push_async_callback(network.aclose)
    stores = _open_stores(config, stack)
    return Worker(
        WorkerParts(
            worker=ref,
            config=config,
            engine_config=device.engine_config,
            pool=device.pool,
            executor=MeteredExecutor(device.executor, observed.metrics.engine),
            backend=device.backend,
            constraints=device.constraints,
            network=network,
            membership=stores.membership,
            health=observed.health,
            rng=rng,
            budget=budget,
            observer=observed.metrics.pulls,
            feed=stores.feed,
            costs=await initial_step_costs(device, stores.costs, observed.health),
            cost_store=stores.costs,
            costs_key=device.costs_key,
            host_tier=device.host_tier,
            disk=device.disk,
            blocks=device.blocks,
            draft=device.draft,
            draft_costs=await initial_step_costs(device.draft, stores.costs, observed.health),
            tracing=tracing,
            admin_port=admin_port,
        )
    )


def _open_stores(config: WorkerConfig, stack: AsyncExitStack) -> _Stores:
    """Open the stores in Redis, or in memory if there is no Redis URL: then no KV events are published."""
    if config.redis_url is None:
        return _Stores(membership=MemoryMembership(), feed=None, costs=MemoryCostStore())
    connection, keys = RedisConnection(config.redis_url), Keys(cluster=config.cluster)
    stack.push_async_callback(connection.aclose)
    return _Stores(
        membership=RedisMembership(connection, keys),
        feed=RedisKvEventFeed(connection, keys),
        costs=RedisCostStore(connection, keys),
    )


def _ready(
    ref: WorkerRef, device: Device, config: WorkerConfig, costs: StepCostModel | None, started_s: float
) -> WorkerReady:
    """Log that the worker has started and describe it."""
    start_s = asyncio.get_running_loop().time() - started_s
    chunk_tokens = device.engine_config.max_num_batched_tokens
    summary = f"{device.summary}, {targets_summary(config.target_factors, costs, chunk_tokens)}"
    ready = WorkerReady(worker=ref, host=socket.gethostname(), summary=summary, start_s=start_s)
    log.info(
        "worker_started",
        worker=str(ref),
        address=ref.address,
        role=config.role,
        device=ready.summary,
        start_s=ready.start_s,
    )
    return ready


async def _run_until_drained(
    worker: Worker, stop: Stop, observed: _Observability, on_ready: Callable[[], None]
) -> None:
    """Run the worker. Raises WorkerUnhealthy after the background tasks have been stopped."""
    unhealthy: WorkerUnhealthy | None = None
    async with Background(
        observed.awake_clock.run(observed.process_metrics.observe_loop),
        _drain_on_stop(stop, worker),
    ):
        on_ready()
        try:
            await worker.run()
        except WorkerUnhealthy as error:
            unhealthy = error
    if unhealthy is not None:
        raise unhealthy


async def _drain_on_stop(stop: Stop, worker: Worker) -> None:
    await stop.drain.wait()
    worker.drain()


def _drain_socket(config: WorkerConfig, worker_id: str, gate: StartupGate) -> DrainSocket | None:
    def drain() -> None:
        if gate.worker is not None:
            gate.worker.drain(node_shutting_down=True)

    return None if config.drain_socket is None else DrainSocket(config.drain_socket, worker_id, drain)


async def _close_healthy_device(device: Device, health: Health) -> None:
    """Close the device, unless it has failed: a failed device may never answer and ends with the process."""
    if health.is_alive:
        await device.aclose()
