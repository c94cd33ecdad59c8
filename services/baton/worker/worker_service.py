"""One worker: an engine, its pool, leases, transfers, sessions and reports, joined. The same over GPUs, on a
CPU and in the simulator.

Everything that meets a device, the network, a store or chance is given to it.
"""

import asyncio
import os
import socket
from dataclasses import dataclass
from random import Random

from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import WorkerReport, WorkerRole, WorkerState
from baton.core.errors import Refused
from baton.core.ids import DecisionId, WorkerRef
from baton.core.interfaces import CostStore, Duplex, KvEventFeed, Member, MemberKind, Membership, Network
from baton.core.messages.jobs import GatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.loop import EngineLoop
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.step import Executor
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.runtime.network.announcements import Announcements
from baton.runtime.observability.health import Health
from baton.runtime.observability.tracing import OFF, Tracing
from baton.transfer.backend import TransferBackend
from baton.transfer.owner.owner_service import OwnerService
from baton.transfer.reader.kv_reader import KvReader
from baton.transfer.reader.peer_reads import ReaderTimes
from baton.transfer.reader.transfer_observer import NoObserver, TransferObserver
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.costs.step_cost_keeper import CostKeeper
from baton.worker.jobs.job_table import JobTable
from baton.worker.jobs.leg import LegParts
from baton.worker.jobs.prefix_puller import PrefixPuller
from baton.worker.pull_watch import PullWatch
from baton.worker.reporting.kv_event_publisher import KvEventPublisher
from baton.worker.reporting.worker_reporter import Reporter
from baton.worker.sessions.gateway_sessions import Sessions
from baton.worker.worker_lifecycle import WorkerLifecycle, WorkerNeedsReplacement, WorkerUnhealthy, draining

log = get_logger(__name__)

KV_EVENTS_TTL_S = 30.0
KV_EVENTS_TTL_HEARTBEATS = 10
"""What this worker held is told for the longer of the two after it has gone: nobody asks for it, and
schedulers that start need not read what is long over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker is built from: its leaves, and the engine that was sized for them. `feed` None: nobody is
    told what it holds. `costs` None: it does not know what its steps cost; else these, corrected by its
    steps, are kept in `cost_store` as `costs_key`."""

    worker: WorkerRef
    config: WorkerConfig
    engine_config: EngineConfig
    pool: BlockPool
    executor: Executor
    backend: TransferBackend
    network: Network
    membership: Membership
    health: Health
    rng: Random
    observer: TransferObserver | None = None
    feed: KvEventFeed | None = None
    costs: StepCostModel | None = None
    cost_store: CostStore | None = None
    costs_key: str = ""
    tracing: Tracing = OFF


class Worker:
    """Implements `core.interfaces.WorkerService`. `run` serves until a drain is done; cancelling it stops at
    once. Its leaves are closed by who gave them."""

    def __init__(self, parts: WorkerParts) -> None:
        config = parts.config
        self.worker = parts.worker
        self.role = WorkerRole(config.role)
        self.pool = parts.pool
        self._parts = parts
        self._config = config
        self._layout = parts.executor.layout
        self._host = socket.gethostname()
        self.tasks = BackgroundTasks(lambda error: self._life.fail(error))
        self._costs = CostKeeper(parts.costs, parts.cost_store, parts.costs_key)
        self.engine = Engine(
            parts.engine_config,
            parts.pool,
            step_costs=lambda: self._costs.costs,
            clock=lambda: asyncio.get_running_loop().time(),
        )
        self.engine_loop = EngineLoop(self.engine, parts.executor, self._deliver, self._costs.observe)
        self.publisher = self._new_publisher()
        self.owner = OwnerService(
            worker=parts.worker,
            layout=self._layout,
            backend=parts.backend,
            pins=parts.pool,
            lookup=parts.pool.lookup,
            lease_s=config.lease_s,
            claim_s=config.kv_claim_timeout_s,
            early_s=config.transfer_reorder_window_s,
            tracing=parts.tracing,
        )
        self.reader = KvReader(
            worker=parts.worker,
            layout=self._layout,
            backend=parts.backend,
            network=parts.network,
            pool=parts.pool,
            rng=parts.rng,
            times=ReaderTimes(
                lease_s=config.lease_s,
                renew_s=min(config.heartbeat_s, config.lease_s / 3),
                deadline_min_s=config.transfer_deadline_min_s,
                deadline_max_s=config.transfer_deadline_max_s,
            ),
            observer=PullWatch(parts.observer or NoObserver(), self._blocks_changed),
            tracing=parts.tracing,
        )
        leg_parts = LegParts(
            worker=parts.worker,
            pid=os.getpid(),
            engine=self.engine_loop,
            pool=parts.pool,
            owner=self.owner,
            reader=self.reader,
            prefixes=PrefixPuller(engine=self.engine, reader=self.reader, costs=lambda: self._costs.costs),
            tasks=self.tasks,
            model_fingerprint=self._layout.model_fingerprint,
            sampler_version=self._layout.sampler_version,
            block_size_tokens=self._layout.block_size_tokens,
            handoff_wait_s=config.pull_wait_s,
            tracing=parts.tracing,
        )
        self.jobs = JobTable(
            leg_parts,
            max_following=config.max_queued_jobs,
            on_counted=lambda decision: self._reporter.counted(decision),
        )
        self.sessions = Sessions(
            parts.worker,
            self._layout,
            self.jobs,
            self.tasks,
            grace_s=config.session_grace_s,
            buffer_bytes=config.session_buffer_bytes,
        )
        self._reporter = Reporter(
            network=parts.network,
            membership=parts.membership,
            schedulers=config.schedulers,
            build=self.report,
            open_decisions=self.jobs.counted_decisions,
            on_command=self._obey,
            heartbeat_s=config.heartbeat_s,
            rng=parts.rng,
            tasks=self.tasks,
        )
        self._life = WorkerLifecycle(
            parts.worker,
            config,
            health=parts.health,
            jobs=self.jobs,
            sessions=self.sessions,
            owner=self.owner,
            reader=self.reader,
            engine_loop=self.engine_loop,
            rng=parts.rng,
            on_change=self._reporter.changed,
        )

    @property
    def state(self) -> WorkerState:
        return self._life.state

    @property
    def node_shutting_down(self) -> bool:
        """It was drained because its machine is about to end."""
        return self._life.node_shutting_down

    # -- what others call ----------------------------------------------------------------------------------------------------------------

    async def session(self, stream: Duplex[WorkerMessage, GatewayMessage]) -> None:
        await self.sessions.serve(stream)

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        if self.state is WorkerState.UNHEALTHY:
            await stream.aclose()
            return
        await self.owner.serve(stream)

    def drain(self, *, node_shutting_down: bool = False) -> None:
        """Take no new job; `run` returns when those that run have ended, or been handed back after `drain_s`,
        and nobody needs this worker's KV any more, at most `lease_s` or `claim_s` later.
        `node_shutting_down`: because its machine is about to end."""
        self._life.drain(node_shutting_down=node_shutting_down)

    async def run(self) -> None:
        """Serve until drained. Raises WorkerUnhealthy, after it has said so to whom it could; WorkerNeedsReplacement
        after it has left worn out."""
        engine = asyncio.create_task(self.engine_loop.run(), name="engine")
        for work in (self._reporter.run, self._announce, self._life.look_after):
            self.tasks.start(work(), name=f"worker-{work.__name__}")
        self.tasks.start(self._costs.run(), name="worker-costs")
        if self.publisher is not None:
            self.tasks.start(self.publisher.run(), name="worker-kv-events")
        if self.state is WorkerState.STARTING:
            self._life.become(WorkerState.READY)
        problem: BaseException | None = None
        try:
            await asyncio.wait((engine, self._life.failed), return_when=asyncio.FIRST_COMPLETED)
            problem = self._life.failed.exception() if self._life.failed.done() else engine.exception()
            if problem is not None:
                await self._life.say_unhealthy(problem)
        finally:
            await self._close(engine)
        if self._life.is_to_be_replaced:
            raise WorkerNeedsReplacement("too many blocks were quarantined: only a new process has that memory back")
        if isinstance(problem, WorkerUnhealthy):
            raise problem
        if problem is not None:
            raise WorkerUnhealthy(f"{type(problem).__name__}: {problem}") from problem

    # -- what people and tests ask -------------------------------------------------------------------------------------------------------

    def report(self, report_seq: int, counted: tuple[DecisionId, ...]) -> WorkerReport:
        engine = self.engine
        return WorkerReport(
            worker=self.worker,
            report_seq=report_seq,
            role=self.role,
            state=self.state,
            model=self._config.model_name,
            layout=self._layout,
            blocks=self.pool.counts(),
            max_model_len=engine.config.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            pid=os.getpid(),
            host=self._host,
            max_num_batched_tokens=engine.config.max_num_batched_tokens,
            waiting_prefill_tokens=engine.waiting_prefill_tokens + self.engine_loop.inbox_prefill_tokens,
            waiting_prefill_attended_tokens=engine.waiting_prefill_attended_tokens
            + self.engine_loop.inbox_prefill_attended_tokens,
            waiting_seqs=engine.waiting_seqs + self.engine_loop.inbox_seqs + self.jobs.num_following,
            running_seqs=engine.running_seqs,
            running_context_tokens=engine.running_context_tokens,
            open_leases=self.owner.open_leases,
            links=tuple(self.reader.links()),
            event_seq=self.publisher.event_seq if self.publisher is not None else 0,
            counted_decision_ids=counted,
            needs_replacement=self._life.needs_replacement,
            costs=self._costs.costs,
            mean_output_tokens=engine.counters.mean_output_tokens,
            slo_step_s=engine.next_step_budget().slo_step_s,
        )

    def debug_state(self) -> dict[str, object]:
        """Where everything is, for people who look for a leak."""
        return {
            "worker": str(self.worker),
            "state": self.state.value,
            "open_jobs": sorted(str(job) for job in self.jobs.open_jobs()),
            "sessions": len(self.sessions),
            "sequences": self.engine.waiting_seqs + self.engine.running_seqs,
            "blocks": self.pool.counts(),
            "open_leases": self.owner.open_leases,
            "tasks": len(self.tasks),
        }

    def check_clean(self) -> None:
        """Raises AssertionError unless this worker is as it was before its first request, but for what is
        cached (invariant I2)."""
        self.pool.check()
        counts = self.pool.counts()
        is_clean = (
            not self.jobs.num_open
            and self.engine.is_idle
            and not self.owner.open_leases
            and counts.free + counts.cached + counts.quarantined == counts.total
        )
        if not is_clean:
            raise AssertionError(f"not clean: {self.debug_state()}")

    # -- inside --------------------------------------------------------------------------------------------------------------------------

    def _deliver(self, outcome: EngineOutcome) -> None:
        self.jobs.deliver(outcome)
        self._blocks_changed()
        self._reporter.changed()

    def _blocks_changed(self) -> None:
        if self.publisher is not None:
            self.publisher.wake()

    def _new_publisher(self) -> KvEventPublisher | None:
        parts = self._parts
        if parts.feed is None:
            return None
        ttl_s = max(KV_EVENTS_TTL_S, KV_EVENTS_TTL_HEARTBEATS * parts.config.heartbeat_s)
        return KvEventPublisher(worker=parts.worker, pool=parts.pool, feed=parts.feed, ttl_s=ttl_s, rng=parts.rng)

    def _obey(self, command: WorkerCommand) -> None:
        log.info("command", kind=command.kind.value, peer=str(command.peer or ""))
        match command.kind:
            case CommandKind.DRAIN:
                self.drain(node_shutting_down=command.node_shutting_down)
            case CommandKind.SNAPSHOT:
                if self.publisher is not None:  # without a store nobody's events are kept
                    self.publisher.ask_snapshot()
            case CommandKind.LEAVE:
                self._life.let_go()
            case CommandKind.CONNECT | CommandKind.PROBE_LINK if command.peer is not None:
                self.tasks.start(self._warm(command.peer), name=f"warm-{command.peer}")
            case _:
                log.warning("command_not_known", kind=command.kind.value)

    async def _warm(self, peer: WorkerRef) -> None:
        """Connect and measure; whether it worked stands in the next report's links."""
        try:
            is_usable = await self.reader.warmed(peer)
        except Refused:  # this worker is leaving
            return
        if not is_usable:
            log.warning("pair_not_usable", worker=str(self.worker), peer=str(peer))
        self._reporter.changed()

    async def _announce(self) -> None:
        """Be listed as a member for as long as this runs."""
        member = Member(
            kind=MemberKind.WORKER,
            member_id=self.worker.worker_id,
            epoch=self.worker.worker_epoch,
            address=self.worker.address,
            info=(("pid", str(os.getpid())), ("host", self._host), ("role", self.role.value)),
        )
        announcements = Announcements(self._parts.membership, member, heartbeat_s=self._config.heartbeat_s)
        try:
            await announcements.announce_forever()
        finally:
            await announcements.withdraw()

    async def _close(self, engine: asyncio.Task[None]) -> None:
        self.jobs.refuse(draining(0.0))
        self.sessions.close()
        engine.cancel()
        await asyncio.wait((engine,))
        await self.reader.aclose()
        await self.owner.aclose()
        await self.tasks.aclose()
