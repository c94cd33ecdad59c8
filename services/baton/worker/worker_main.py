"""`baton worker`: one worker as a process, or in a thread of a Ray actor: device, gRPC, Redis and admin port
joined around the service."""

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random

from prometheus_client import CollectorRegistry

from baton.core.errors import BatonError, ConfigError
from baton.core.ids import WorkerRef
from baton.core.interfaces import CostStore, Duplex, KvEventFeed, Membership
from baton.core.messages.jobs import GatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.step_cost import StepCostModel
from baton.engine.state.step import DeviceFault
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.grpc_tls import between_services
from baton.runtime import failpoints
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.runtime.network.addresses import advertised_host, join_address
from baton.runtime.observability.admin_http import AdminServer
from baton.runtime.observability.health import Health
from baton.runtime.observability.metrics import ProcessMetrics, process_registry
from baton.runtime.observability.open_tracing import open_tracing
from baton.runtime.process.drain_socket import DrainSocket
from baton.runtime.process.process import Background, ServiceThread, Stop, StoppedNow, frozen_heap, watch_loop_lag
from baton.store.memory.memory_stores import MemoryCostStore, MemoryMembership
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_cost_store import RedisCostStore
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_kv_event_feed import RedisKvEventFeed
from baton.store.redis.redis_membership import RedisMembership
from baton.worker.costs.calibrate import measure_costs, turn, turn_path
from baton.worker.costs.step_cost_keeper import known_or_measured
from baton.worker.device.open_device import open_device
from baton.worker.device.worker_device import Device
from baton.worker.worker_metrics import MeteredExecutor, WorkerMetrics
from baton.worker.worker_service import Worker, WorkerNeedsReplacement, WorkerParts, WorkerUnhealthy

log = get_logger(__name__)

STREAMS_GRACE_S = 1.0
"""Time for streams that have been closed to take leave of their other ends."""
UNHEALTHY_EXIT_CODE = 70
"""`EX_SOFTWARE`: whoever looks after this process starts another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """What a started worker says of itself. `start_s`: how long that took."""

    worker: WorkerRef
    host: str
    summary: str
    start_s: float


class StartupGate:
    """Implements `WorkerService` from the moment the port is bound: until the worker is there, whoever comes
    is sent away."""

    def __init__(self) -> None:
        self.worker: Worker | None = None

    async def session(self, stream: Duplex[WorkerMessage, GatewayMessage]) -> None:
        await (self.worker.session(stream) if self.worker else stream.aclose())

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        await (self.worker.peer(stream) if self.worker else stream.aclose())


async def serve(
    config: WorkerConfig, stop: Stop, on_ready: Callable[[str], None], exit_now: Callable[[int], None] = os._exit
) -> None:
    """Serve as a process's own work, until a drain that `stop` asks for is done; `on_ready` gets the worker's
    address.

    Ends the process by `exit_now`: with nothing left to close, an interpreter that has loaded torch would
    still take a second or more to clear itself; and the thread of a device at fault may be stuck, which would
    keep the process alive.
    """
    code = 0
    try:
        await run_worker(config, stop, lambda ready: on_ready(ready.worker.address))
    except WorkerUnhealthy:
        code = UNHEALTHY_EXIT_CODE
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(code)


async def run_worker(config: WorkerConfig, stop: Stop, on_ready: Callable[[WorkerReady], None]) -> bool:
    """Serve until drained; whether that was because its machine is about to end. Raises ConfigError or
    ModelError when it cannot start, WorkerUnhealthy when it must not go on: then the device is left as it is,
    since it may never answer."""
    if config.redis_url is None and not config.schedulers:
        raise ConfigError(
            "no way to find a scheduler: give --schedulers HOST:PORT,... or the --redis-url that they announce themselves in"
        )
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    rng = Random()
    worker_id = config.worker_id or f"worker-{rng.getrandbits(32):08x}"
    failpoints.identify(worker=worker_id, role=config.role)
    registry, health, doorway = process_registry("worker"), Health("model"), StartupGate()
    metrics, process_metrics = WorkerMetrics(registry), ProcessMetrics(registry)
    async with AsyncExitStack() as stack:
        drain_socket = _drain_socket(config, worker_id, doorway)
        if drain_socket is not None:
            stack.push_async_callback(
                drain_socket.stop
            )  # last of all: who waits there hears that this process has no more to do
        server = GrpcServer(heartbeat_s=config.heartbeat_s, tls=between_services(config))
        server.add_worker(doorway)
        server.follow(health)
        port = await server.start(config.host, config.rpc_port)
        stack.push_async_callback(server.stop, STREAMS_GRACE_S)
        hanging_up: list[asyncio.Task[None]] = []

        def hang_up(changed: Health) -> None:
            """Whoever dials an unhealthy worker is refused, as where no process is: gateways then know that
            it died, and of what."""
            if not changed.is_alive and not hanging_up:
                hanging_up.append(loop.create_task(server.stop(0.0), name="hang-up"))

        health.on_change(hang_up)
        await _admin_port(config, health, registry, metrics, doorway, stack)
        ref = WorkerRef(
            worker_id=worker_id,
            worker_epoch=rng.getrandbits(64),
            address=join_address(advertised_host(config.host, config.advertise_host), port),
        )
        metrics.identify(ref, config.role)
        tracing = open_tracing(
            config,
            process_metrics,
            "worker",
            worker_id,
            {"baton.role": config.role, "baton.worker_epoch": f"{ref.worker_epoch:016x}"},
        )
        stack.push_async_callback(tracing.aclose)
        device = await asyncio.to_thread(open_device, config, ref)
        stack.push_async_callback(_close_answering, device, health)
        network = GrpcNetwork(heartbeat_s=config.heartbeat_s, tls=between_services(config))
        stack.push_async_callback(network.aclose)
        stores = _stores(config, stack)
        costs = await _costs(device, stores.costs, health)
        worker = Worker(
            WorkerParts(
                worker=ref,
                config=config,
                engine_config=device.engine_config,
                pool=device.pool,
                executor=MeteredExecutor(device.executor, metrics.engine),
                backend=device.backend,
                network=network,
                membership=stores.membership,
                health=health,
                rng=rng,
                observer=metrics.pulls,
                feed=stores.feed,
                costs=costs,
                cost_store=stores.costs,
                costs_key=device.costs_key,
                tracing=tracing,
            )
        )
        doorway.worker = worker
        if drain_socket is not None:
            await drain_socket.start()
        ready = WorkerReady(
            worker=ref, host=socket.gethostname(), summary=device.summary, start_s=loop.time() - began_s
        )
        log.info(
            "worker_started",
            worker=str(ref),
            address=ref.address,
            role=config.role,
            device=ready.summary,
            start_s=ready.start_s,
        )
        stack.enter_context(frozen_heap())
        health.ready("model")
        unhealthy: WorkerUnhealthy | None = None
        async with Background(watch_loop_lag(process_metrics.observe_loop), _drain_when_asked(stop, worker)):
            on_ready(ready)
            try:
                await worker.run()
            except WorkerUnhealthy as error:
                unhealthy = error
        if unhealthy is not None:
            raise unhealthy
        return worker.node_shutting_down


class WorkerThread:
    """A worker inside somebody else's process, such as a Ray actor: in a thread with a loop of its own and no
    signal handlers. Any thread may call. One that became unhealthy ends the whole process by `exit_now`; one
    that is worn out lives to say so."""

    def __init__(self, config: WorkerConfig, exit_now: Callable[[int], None] = os._exit) -> None:
        self._config = config
        self._exit_now = exit_now
        self._starting = threading.Lock()
        self._is_started = False
        self._is_ready = threading.Event()
        self._ready: WorkerReady | None = None
        self.node_shutting_down = False
        """Once it has ended: it was drained because its machine is about to end."""
        self._thread = ServiceThread(self._main, name="worker")

    def start(self) -> WorkerReady:
        """Load the model and serve; returns when the worker is ready. Raises what made it fail.

        Asked again, by whom else it may concern, it says the same of the same worker; of one that has ended
        since, that it has.
        """
        with self._starting:
            if not self._is_started:
                self._is_started = True
                self._thread.start()
        self._is_ready.wait()
        if self._ready is None or not self._thread.is_alive:
            self._thread.join()
            error = self._thread.error
            if error is None or isinstance(error, StoppedNow):
                raise BatonError(
                    "the worker was stopped before it was ready" if self._ready is None else "the worker has ended"
                )
            raise error
        return self._ready

    def wait(self, limit_s: float | None = None) -> str | None:
        """Block until the worker has ended; why it did, empty for a drain or stop that was asked for, None
        when it has not in `limit_s`."""
        if not self._thread.join(limit_s):
            return None
        error = self._thread.error
        return "" if error is None or isinstance(error, StoppedNow) else f"{type(error).__name__}: {error}"

    def drain(self) -> None:
        """Finish what runs, take nothing new, then end."""
        self._thread.request_stop()

    def stop(self) -> None:
        """End now."""
        self._thread.request_stop_now()

    async def _main(self, stop: Stop) -> None:
        try:
            self.node_shutting_down = await run_worker(self._config, stop, self._on_ready)
        except WorkerNeedsReplacement:
            raise
        except WorkerUnhealthy:
            self._exit_now(UNHEALTHY_EXIT_CODE)
            raise
        finally:
            self._is_ready.set()

    def _on_ready(self, ready: WorkerReady) -> None:
        self._ready = ready
        self._is_ready.set()


def _drain_socket(config: WorkerConfig, worker_id: str, doorway: StartupGate) -> DrainSocket | None:
    def drain() -> None:
        if doorway.worker is not None:
            doorway.worker.drain(node_shutting_down=True)

    return None if config.drain_socket is None else DrainSocket(config.drain_socket, worker_id, drain)


async def _drain_when_asked(stop: Stop, worker: Worker) -> None:
    await stop.drain.wait()
    worker.drain()


async def _close_answering(device: Device, health: Health) -> None:
    """A device that is at fault may never answer: it ends with the process."""
    if health.is_alive:
        await device.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stores:
    """What processes share."""

    membership: Membership
    feed: KvEventFeed | None
    costs: CostStore


def _stores(config: WorkerConfig, stack: AsyncExitStack) -> _Stores:
    """In Redis, or without a URL in this process alone: then the schedulers' addresses are given, and nobody
    asks what it holds."""
    if config.redis_url is None:
        return _Stores(membership=MemoryMembership(), feed=None, costs=MemoryCostStore())
    connection, keys = RedisConnection(config.redis_url), Keys(cluster=config.cluster)
    stack.push_async_callback(connection.aclose)
    return _Stores(
        membership=RedisMembership(connection, keys),
        feed=RedisKvEventFeed(connection, keys),
        costs=RedisCostStore(connection, keys),
    )


async def _costs(device: Device, store: CostStore, health: Health) -> StepCostModel | None:
    """What the device says of itself, or else an earlier worker of its kind; or what is measured now, while
    no other worker of this host measures. Raises WorkerUnhealthy where the device is at fault."""
    if device.costs is not None or not device.costs_key:
        return device.costs

    async def alone() -> StepCostModel | None:
        async with turn(turn_path()):  # whoever had it before us may have been of our kind
            return await known_or_measured(store, device.costs_key, measured)

    def measured() -> Awaitable[StepCostModel | None]:
        return measure_costs(device.executor, device.engine_config, device.pool)

    try:
        return await known_or_measured(store, device.costs_key, alone)
    except DeviceFault as error:
        health.fail(str(error))
        raise WorkerUnhealthy(f"the device failed while its steps were measured: {error}") from error


async def _admin_port(
    config: WorkerConfig,
    health: Health,
    registry: CollectorRegistry,
    metrics: WorkerMetrics,
    doorway: StartupGate,
    stack: AsyncExitStack,
) -> None:
    if config.admin_port is None:
        return

    def refresh() -> None:
        if doorway.worker is not None:
            metrics.refresh(doorway.worker)

    server = AdminServer(health, registry, refresh)
    port = server.start(config.host, config.admin_port)
    stack.push_async_callback(server.stop)
    log.info("admin_started", address=join_address(config.host, port))
