"""One worker: connects the engine, block pool, KV transfers, gateway sessions and reports.

The same code runs on GPUs, on a CPU and in the simulator. Device, network, stores and randomness are passed
in.
"""

import asyncio
import os
import socket

from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.cluster.worker_report import WorkerReport, WorkerRole, WorkerState
from baton.core.errors import Refused
from baton.core.ids import DecisionId, WorkerRef
from baton.core.interfaces import Duplex, Member, MemberKind
from baton.core.messages.jobs import ReceivedGatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.core.request import SessionKey
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.engine.loop import EngineLoop
from baton.engine.speculation.modes import open_speculation
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.step import StepPlan
from baton.runtime.logging import get_logger
from baton.runtime.network.announcements import Announcements, process_details
from baton.runtime.process.byte_budget import Account
from baton.runtime.process.shared_account import SharedAccount
from baton.worker.background_tasks import BackgroundTasks, FirstFailure
from baton.worker.costs.draft_speedup import RecentDraftSpeedup
from baton.worker.costs.evicted_kv import EvictedKv
from baton.worker.costs.prefill_share import RecentPrefillShare
from baton.worker.costs.step_cost_keeper import CostKeeper, work_of
from baton.worker.jobs.job_table import JobTable
from baton.worker.jobs.leg import LegParts
from baton.worker.jobs.prefix_puller import PrefixPuller
from baton.worker.jobs.running_legs import RunningLegs
from baton.worker.prefix_files.prefix_copies import PrefixCopies
from baton.worker.reporting.worker_reporter import ChangeNotifier, Reporter
from baton.worker.sessions.gateway_sessions import Sessions
from baton.worker.worker_lifecycle import WorkerLifecycle, WorkerNeedsReplacement, WorkerUnhealthy, draining
from baton.worker.worker_parts import (
    WorkerParts,
    build_draft_model,
    build_owner,
    build_publisher,
    build_reader,
    draft_cost_keeper,
)
from baton.worker.worker_tiers import WorkerTiers

log = get_logger(__name__)


class Worker:
    """One worker. Implements `core.interfaces.WorkerService`.

    `run` serves until a drain has finished; cancelling `run` stops the worker immediately. The caller closes
    the objects in `WorkerParts` afterwards.
    """

    def __init__(self, parts: WorkerParts) -> None:
        """Build all parts in dependency order. Requires a running event loop."""
        self.worker = parts.worker
        self.role = WorkerRole(parts.config.role)
        self.pool = parts.pool
        self._parts = parts
        self._config = parts.config
        self.layout = parts.executor.layout
        self._host = socket.gethostname()
        self.budget = parts.budget
        # Where prefill and decode workers differ, both copies of a session's KV are of use for the next turn.
        self._moves_sessions = self.role is WorkerRole.HYBRID and parts.config.kv_eviction == "value"
        self._failure = FirstFailure()
        self._notifier = ChangeNotifier()
        self.tasks = BackgroundTasks(self._failure.set)
        self._costs = CostKeeper(parts.costs, parts.cost_store, parts.costs_key)
        self._draft_costs = draft_cost_keeper(parts)
        self._prefill_share = RecentPrefillShare(lambda: self._costs.costs, asyncio.get_running_loop().time)
        self._draft_speedup = RecentDraftSpeedup(lambda: self._costs.costs, asyncio.get_running_loop().time)
        self.engine = Engine(
            parts.engine_config,
            parts.pool,
            step_costs=lambda: self._costs.costs,
            clock=lambda: asyncio.get_running_loop().time(),
            speculation=open_speculation(parts.config.speculate, build_draft_model(parts, self._draft_costs)),
            draft_speedup=lambda: self._draft_speedup.now,
            reloads_preempted=bool(parts.tiers),
        )
        self.publisher = build_publisher(parts)
        self.reader = build_reader(parts, on_pull_end=self._publish_kv_events)
        self.legs = RunningLegs(parts.pool)
        self.engine_loop = EngineLoop(self.engine, parts.executor, self._deliver, self._on_step)
        self.kv = self._build_tiers()
        self.owner = build_owner(parts, reload_prefix=self.kv.reload_for_peer, on_session_moved=self._session_moved)
        self._evicted_kv = EvictedKv(parts.pool, parts.tiers)
        self.prefix_copies = PrefixCopies(
            engine=self.engine,
            tiers=parts.tiers,
            blocks=parts.blocks,
            layout=self.layout,
            on_changed=self._publish_kv_events,
        )
        self.jobs = JobTable(
            self._build_leg_parts(),
            self.legs,
            max_following=parts.config.max_queued_jobs,
            on_counted=self._notifier.counted,
            budget=self.budget,
        )
        self.sessions = Sessions(
            parts.worker,
            self.layout,
            self.jobs,
            self.tasks,
            grace_s=parts.config.session_grace_s,
            buffer_bytes=parts.config.session_buffer_bytes,
            buffers=SharedAccount(self.budget, Account.SESSIONS, "unacknowledged output"),
        )
        self._lifecycle = self._build_lifecycle()
        self._reporter = self._build_reporter()

    def _build_tiers(self) -> WorkerTiers:
        return WorkerTiers(
            self._parts,
            self.engine,
            tasks=self.tasks,
            costs=lambda: self._costs.costs,
            returned=self.engine_loop.returned,
            on_stored=self._publish_kv_events,
        )

    def _build_leg_parts(self) -> LegParts:
        parts = self._parts
        return LegParts(
            worker=parts.worker,
            pid=os.getpid(),
            engine=self.engine_loop,
            pool=parts.pool,
            owner=self.owner,
            reader=self.reader,
            reloads=self.kv.reloads,
            prefetches=self.kv.prefetches,
            owners=self.kv.retention.owners,
            prefixes=PrefixPuller(engine=self.engine, reader=self.reader, costs=lambda: self._costs.costs),
            tasks=self.tasks,
            constraints=parts.constraints,
            model_fingerprint=self.layout.model_fingerprint,
            sampler_version=self.layout.sampler_version,
            block_size_tokens=self.layout.block_size_tokens,
            pull_wait_s=parts.config.pull_wait_s,
            moves_sessions=self._moves_sessions,
            tracing=parts.tracing,
        )

    def _build_lifecycle(self) -> WorkerLifecycle:
        return WorkerLifecycle(
            self.worker,
            self._config,
            failure=self._failure,
            health=self._parts.health,
            jobs=self.jobs,
            sessions=self.sessions,
            owner=self.owner,
            reader=self.reader,
            engine_loop=self.engine_loop,
            rng=self._parts.rng,
            on_change=self._notifier.changed,
        )

    def _build_reporter(self) -> Reporter:
        return Reporter(
            network=self._parts.network,
            membership=self._parts.membership,
            schedulers=self._config.schedulers,
            build=self.report,
            notifier=self._notifier,
            open_decisions=self.jobs.counted_decisions,
            on_command=self._handle_command,
            heartbeat_s=self._config.heartbeat_s,
            rng=self._parts.rng,
            tasks=self.tasks,
        )

    @property
    def state(self) -> WorkerState:
        return self._lifecycle.state

    @property
    def step_costs(self) -> StepCostModel | None:
        """The cost model of the worker, corrected by its steps; None if unknown."""
        return self._costs.costs

    @property
    def node_shutting_down(self) -> bool:
        """True if the worker drains because its machine is shutting down."""
        return self._lifecycle.node_shutting_down

    # -- calls from servers and the process --------------------------------------------------------

    async def session(self, stream: Duplex[WorkerMessage, ReceivedGatewayMessage]) -> None:
        """Serve the session stream of one gateway until it ends."""
        await self.sessions.serve(stream)

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        """Serve the stream of one peer that reads KV from here. An unhealthy worker closes it immediately."""
        if self.state is WorkerState.UNHEALTHY:
            await stream.aclose()
            return
        await self.owner.serve(stream)

    async def copy_prefix(self, stream: Duplex[PrefixReply, PrefixRequest]) -> None:
        """Export a cached prefix to a gateway, or import one."""
        await self.prefix_copies.serve(stream)

    def drain(self, *, node_shutting_down: bool = False) -> None:
        """Take no new jobs; `run` returns once the running ones have ended and no peer needs this worker's
        KV.

        Jobs that still run after `drain_s` are stopped with a retriable failure. Leases delay the end by at
        most `lease_s` or `kv_claim_timeout_s`. `node_shutting_down`: the machine is shutting down, so no
        replacement starts on it.
        """
        self._lifecycle.drain(node_shutting_down=node_shutting_down)

    async def run(self) -> None:
        """Serve until drained.

        Raises WorkerUnhealthy after reporting the failure, WorkerNeedsReplacement after a drain that was
        caused by quarantined blocks.
        """
        engine = asyncio.create_task(self.engine_loop.run(), name="engine")
        self._start_tasks()
        if self.state is WorkerState.STARTING:
            self._lifecycle.move_to(WorkerState.READY)
        failed = self._failure.future
        problem: BaseException | None = None
        try:
            await asyncio.wait((engine, failed), return_when=asyncio.FIRST_COMPLETED)
            problem = failed.exception() if failed.done() else engine.exception()
            if problem is not None:
                await self._lifecycle.shut_down_unhealthy(problem)
        finally:
            await self._close(engine)
        if self._lifecycle.is_to_be_replaced:
            raise WorkerNeedsReplacement(
                "too many blocks were quarantined, or reads in doubt blocked a link; restart the worker process to get "
                "memory and link back"
            )
        if isinstance(problem, WorkerUnhealthy):
            raise problem
        if problem is not None:
            raise WorkerUnhealthy(f"{type(problem).__name__}: {problem}") from problem

    # -- introspection -----------------------------------------------------------------------------

    def report(self, report_seq: int, counted: tuple[DecisionId, ...]) -> WorkerReport:
        """Build the report for a scheduler.

        `counted`: decisions that the numbers contain since the last report.
        """
        engine, engine_loop = self.engine, self.engine_loop
        return WorkerReport(
            worker=self.worker,
            report_seq=report_seq,
            role=self.role,
            state=self.state,
            model=self._config.model_name,
            layout=self.layout,
            blocks=self.pool.counts(),
            max_model_len=engine.config.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            pid=os.getpid(),
            host=self._host,
            max_num_batched_tokens=engine.config.max_num_batched_tokens,
            waiting_prefill_tokens=engine.waiting_prefill_tokens + engine_loop.inbox_prefill_tokens,
            waiting_prefill_attended_tokens=engine.waiting_prefill_attended_tokens
            + engine_loop.inbox_prefill_attended_tokens,
            waiting_seqs=engine.waiting_seqs + engine_loop.inbox_seqs + self.jobs.num_preparing,
            running_seqs=engine.running_seqs,
            running_context_tokens=engine.running_context_tokens,
            open_leases=self.owner.open_leases,
            links=tuple(self.reader.links()),
            event_seq=self.publisher.event_seq if self.publisher is not None else 0,
            announce_every=self.pool.announce_every,
            counted_decision_ids=counted,
            needs_replacement=self._lifecycle.needs_replacement,
            costs=self._costs.costs,
            mean_output_tokens=engine.counters.mean_output_tokens,
            target_step_s=engine.next_step_budget().target_step_s,
            recent_prefill_share=self._prefill_share.share,
            tokens_per_step=self._draft_speedup.now.tokens_per_step,
            ttft_target_factor=engine.config.targets.ttft,
            tpot_target_factor=engine.config.targets.tpot,
            evicted_reuse=self._evicted_kv.reused_share,
            tiers=self.kv.reports(),
            reloads=self.kv.reload_counts,
        )

    def debug_state(self) -> dict[str, object]:
        """Return the worker's open jobs, sessions, sequences, blocks and leases, for debugging leaks."""
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
        """Raise AssertionError unless nothing is left of past requests except cached and quarantined
        blocks."""
        self.pool.check()
        self.kv.check()
        counts = self.pool.counts()
        if self._parts.draft is not None and (used := self._parts.draft.pool.counts().used):
            raise AssertionError(f"{used} blocks of the draft model are in use; must be none")
        is_clean = (
            not self.jobs.num_open
            and self.engine.is_idle
            and not self.owner.open_leases
            and counts.free + counts.cached + counts.quarantined == counts.total
            and not self.kv.is_busy
        )
        if not is_clean:
            raise AssertionError(f"not clean: {self.debug_state()}")

    # -- internal ----------------------------------------------------------------------------------

    def _deliver(self, outcome: EngineOutcome) -> None:
        self.legs.deliver(outcome)
        self.kv.deliver(outcome)
        self._publish_kv_events()
        self._notifier.changed()

    def _on_step(self, plan: StepPlan, step_s: float) -> None:
        work = work_of(plan)
        self._prefill_share.observe(work, step_s)
        num_accepted = self.engine.counters.accepted_draft_tokens
        self._draft_speedup.observe(work, step_s, self.engine_loop.draft_model_s, num_accepted)
        self._costs.observe(work, step_s)

    def _publish_kv_events(self) -> None:
        if self.publisher is not None:
            self.publisher.wake()

    def _session_moved(self, session: SessionKey, num_blocks: int) -> None:
        """Evict the KV of a session first, because it goes on at another worker, which has these blocks."""
        if self._moves_sessions:
            self.kv.retention.owners.moved(session, num_blocks)

    def _handle_command(self, command: WorkerCommand) -> None:
        log.info("command_received", kind=command.kind.value, peer=str(command.peer or ""))
        match command.kind:
            case CommandKind.DRAIN:
                self.drain(node_shutting_down=command.node_shutting_down)
            case CommandKind.SNAPSHOT:
                if self.publisher is not None:  # without a store no events are published
                    self.publisher.request_snapshot()
            case CommandKind.REPLACE:
                self._lifecycle.accept_replacement()
            case CommandKind.CLEAR:
                self.tasks.start(self._clear_tenant(command.tenant_salt), name="clear-tenant")
            case CommandKind.CONNECT | CommandKind.PROBE_LINK if command.peer is not None:
                self.tasks.start(self._warm_link(command.peer), name=f"warm-{command.peer}")
            case _:
                log.warning("command_ignored", kind=command.kind.value)

    async def _clear_tenant(self, tenant_salt: bytes) -> None:
        await self.kv.clear_tenant(tenant_salt)
        self._publish_kv_events()

    async def _warm_link(self, peer: WorkerRef) -> None:
        """Connect to a peer and measure the link. The next report contains the result."""
        try:
            is_usable = await self.reader.warmed(peer)
        except Refused:  # this worker is shutting down
            return
        if not is_usable:
            log.warning("link_warmup_failed", worker=str(self.worker), peer=str(peer))
        self._notifier.changed()

    def _start_tasks(self) -> None:
        self.tasks.start(self._reporter.run(), name="worker-reporter")
        self.tasks.start(self._announce(), name="worker-membership")
        self.tasks.start(self._lifecycle.run(), name="worker-lifecycle")
        self.tasks.start(self._costs.run(), name="worker-costs")
        self.tasks.start(self._draft_costs.run(), name="worker-draft-costs")
        if self.publisher is not None:
            self.tasks.start(self.publisher.run(), name="worker-kv-events")
        self.kv.start(on_measured=self._notifier.changed)

    async def _announce(self) -> None:
        """Keep the worker listed as a member while this task runs."""
        member = Member(
            kind=MemberKind.WORKER,
            member_id=self.worker.worker_id,
            epoch=self.worker.worker_epoch,
            address=self.worker.address,
            info=(
                *process_details(os.getpid(), self._host, self._parts.admin_port),
                ("role", self.role.value),
            ),
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
        self.kv.close()
        await self.prefix_copies.aclose()
        await self.reader.aclose()
        await self.owner.aclose()
        await self.tasks.aclose()
