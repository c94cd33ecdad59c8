"""Runs a whole cluster in one process: the real gateway, scheduler and workers over injected components.

The simulator injects a simulated device, network and store. Tests and notebooks can inject real ones.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from baton.core.cluster.worker_report import WorkerRole
from baton.core.ids import WorkerRef
from baton.core.interfaces import (
    DecisionStore,
    KvEventFeed,
    Member,
    MemberKind,
    Membership,
    Network,
    SchedulerService,
    WorkerService,
)
from baton.core.step_cost import StepCostModel
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.step import Executor
from baton.gateway.gateway_budget import gateway_budget
from baton.gateway.gateway_rules import GatewayRules
from baton.gateway.gateway_service import GatewayService
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.config.config_base import derive
from baton.runtime.config.settings import ClusterConfig, SchedulerConfig, WorkerConfig
from baton.runtime.network.announcements import Announcements
from baton.runtime.observability.health import Health
from baton.runtime.observability.metrics import GatewayMetrics, SchedulerMetrics
from baton.runtime.process.awake_clock import AwakeClock
from baton.runtime.process.process import Background
from baton.scheduler.scheduler_budget import scheduler_budget
from baton.scheduler.scheduler_service import Scheduler, SchedulerRules
from baton.scheduler.state.worker_streams import SchedulerTimes
from baton.transfer.backend import TransferBackend
from baton.worker.device.worker_device import DraftDevice
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.host_tier import HostTier
from baton.worker.worker_budget import worker_budget
from baton.worker.worker_parts import WorkerParts
from baton.worker.worker_service import Worker, WorkerNeedsReplacement


class Switchboard(Protocol):
    """The network between the processes of an in-process cluster. Processes are found by their address."""

    def host(self, address: str) -> Network:
        """Return the network interface of the process at `address`."""
        ...

    def listen(self, address: str, service: WorkerService | SchedulerService) -> None:
        """Make a service reachable at `address`."""
        ...

    async def kill(self, address: str) -> None:
        """Break all streams of the process at `address` and make it unreachable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerComponents:
    """The replaceable parts of one worker.

    engine_config, pool, executor, backend, constraints, tier, disk: as in `WorkerParts`.
    costs: cost model of its steps; None if it is measured.
    draft: the draft model, with its costs; None if there is none.
    close: called when the worker has ended, in any way.
    """

    engine_config: EngineConfig
    pool: BlockPool
    executor: Executor
    backend: TransferBackend
    constraints: TokenConstraints
    host_tier: HostTier | None = None
    disk: DiskTier | None = None
    costs: StepCostModel | None = None
    draft: DraftDevice | None = None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    address: str
    task: asyncio.Task[None]


class InProcessCluster:
    """A cluster whose processes are tasks of one event loop. Each can be killed and started again.

    Processes are named `scheduler`, `gateway`, or by worker id.

    workers: the running workers by id.
    gateway: the gateway that was started last.
    """

    def __init__(
        self,
        *,
        config: ClusterConfig,
        switchboard: Switchboard,
        membership: Membership,
        decisions: DecisionStore,
        feed: KvEventFeed,
        tokenizer: Tokenizer,
        make_components: Callable[[WorkerRef, WorkerConfig], WorkerComponents],
        rng: Random,
    ) -> None:
        self._config = config
        self._switchboard = switchboard
        self._membership = membership
        self._decisions = decisions
        self._feed = feed
        self._tokenizer = tokenizer
        self._make_components = make_components
        self._rng = rng
        self._processes: dict[str, _Process] = {}
        self.workers: dict[str, Worker] = {}
        self.gateway: GatewayService

    async def start(self) -> None:
        """Start the scheduler, the gateway and all workers of the configuration."""
        self.start_scheduler()
        await self.start_gateway()
        roles = {
            WorkerRole.PREFILL: self._config.prefill,
            WorkerRole.DECODE: self._config.decode,
            WorkerRole.HYBRID: self._config.hybrid,
        }
        for role, number in roles.items():
            for index in range(number):
                self.start_worker(f"{role.value}-{index}", role)

    def start_scheduler(self, name: str = "scheduler") -> Scheduler:
        """Start a scheduler with a new epoch."""
        config, epoch = self._config, self._rng.getrandbits(64)
        address = self._address(name, epoch)
        awake = AwakeClock(asyncio.get_running_loop().time)
        scheduler = Scheduler(
            scheduler_id=name,
            rules=SchedulerRules.of(derive(SchedulerConfig, config)),
            times=SchedulerTimes.of(config),
            store=self._decisions,
            feed=self._feed,
            metrics=SchedulerMetrics(CollectorRegistry()),
            rng=self._new_rng(),
            budget=scheduler_budget(config.memory_budget),
            awake_clock=awake,
        )
        self._switchboard.listen(address, scheduler)
        member = Member(kind=MemberKind.SCHEDULER, member_id=name, epoch=epoch, address=address)
        announcements = Announcements(
            self._membership, member, heartbeat_s=config.heartbeat_s, on_listed=scheduler.listed
        )

        async def run() -> None:
            try:
                async with Background(awake.run(_ignore_stall)):
                    await announcements.announce_forever()
            finally:
                await scheduler.aclose()

        self._run(name, address, run)
        return scheduler

    async def start_gateway(self, name: str = "gateway") -> GatewayService:
        """Start a gateway, and wait until it accepts requests."""
        config, address = self._config, self._address(name, self._rng.getrandbits(64))
        awake = AwakeClock(asyncio.get_running_loop().time)
        gateway = GatewayService(
            GatewayRules(
                gateway_id=name,
                model=config.model_name,
                heartbeat_s=config.heartbeat_s,
                detection_s=config.detection_s,
                scheduler_wait_s=config.scheduler_wait_s,
                request_timeout_s=config.request_timeout_s,
                default_slo=config.default_slo,
                max_open_requests=config.max_open_requests,
                max_attempts=config.max_attempts,
                stream_buffer_bytes=config.stream_buffer_bytes,
                max_response_bytes=config.max_response_bytes,
                tool_parser=config.tool_parser,
                reasoning_parser=config.reasoning_parser,
                allow_request_chat_template=config.allow_request_chat_template,
                strict_fields=config.strict_fields,
            ),
            network=self._switchboard.host(address),
            tokenizer=self._tokenizer,
            metrics=GatewayMetrics(CollectorRegistry()),
            rng=self._new_rng(),
            budget=gateway_budget(config.memory_budget),
            membership=self._membership,
            awake_clock=awake,
        )
        entered = asyncio.Event()

        async def run() -> None:
            async with Background(awake.run(_ignore_stall)), gateway:
                entered.set()
                await asyncio.Event().wait()

        self._run(name, address, run)
        await entered.wait()
        self.gateway = gateway
        return gateway

    def start_worker(self, worker_id: str, role: WorkerRole) -> Worker:
        """Start a worker with a new epoch."""
        epoch = self._rng.getrandbits(64)
        worker_ref = WorkerRef(worker_id=worker_id, worker_epoch=epoch, address=self._address(worker_id, epoch))
        config = derive(WorkerConfig, self._config, worker_id=worker_id, role=role.value)
        components = self._make_components(worker_ref, config)
        worker = Worker(
            WorkerParts(
                worker=worker_ref,
                config=config,
                engine_config=components.engine_config,
                pool=components.pool,
                executor=components.executor,
                backend=components.backend,
                constraints=components.constraints,
                network=self._switchboard.host(worker_ref.address),
                membership=self._membership,
                health=Health(),
                rng=self._new_rng(),
                budget=worker_budget(config.memory_budget),
                feed=self._feed,
                host_tier=components.host_tier,
                disk=components.disk,
                costs=components.costs,
                draft=components.draft,
                draft_costs=None if components.draft is None else components.draft.costs,
            )
        )
        self._switchboard.listen(worker_ref.address, worker)

        async def run() -> None:
            try:
                await worker.run()
            except WorkerNeedsReplacement:
                await self._switchboard.kill(worker_ref.address)
                self.start_worker(worker_id, role)  # as a fleet restarts it
            finally:
                await components.backend.aclose()
                components.close()

        self._run(worker_id, worker_ref.address, run)
        self.workers[worker_id] = worker
        return worker

    async def kill(self, name: str) -> None:
        """Kill a process without any goodbye. Raises the error that ended it before, if any."""
        process = self._processes.pop(name)
        self.workers.pop(name, None)
        await self._switchboard.kill(process.address)
        process.task.cancel()
        with suppress(asyncio.CancelledError):
            await process.task

    async def stop_worker(self, worker_id: str) -> None:
        """Drain a worker and wait for its end, as after SIGTERM. Raises the error that ended it, if any."""
        self.workers.pop(worker_id).drain()
        process = self._processes.pop(worker_id)
        await process.task
        await self._switchboard.kill(process.address)

    def raise_failures(self) -> None:
        """Raise the error of a process that ended without being killed, if there is one."""
        for process in self._processes.values():
            if process.task.done():
                process.task.result()

    async def aclose(self) -> None:
        """Kill all processes, workers last, so that the other processes' streams end while workers live."""
        for name in sorted(self._processes, key=lambda name: name in self.workers):
            await self.kill(name)

    def _address(self, name: str, epoch: int) -> str:
        """Return the address of a process that starts now. No earlier process had it."""
        return f"{name}:{epoch:x}"

    def _run(self, name: str, address: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(run(), name=name)
        self._processes[name] = _Process(address=address, task=task)

    def _new_rng(self) -> Random:
        return Random(self._rng.getrandbits(64))


def _ignore_stall(_late_s: float, _stall_s: float) -> None:
    """Take the measurements of an `AwakeClock`, which real processes export as metrics."""
