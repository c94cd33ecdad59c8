"""The lifecycle of a worker: its state, and the events that change it.

States: STARTING -> READY -> DRAINING -> end of `run`, or UNHEALTHY from any of them. A drain command, too
many quarantined blocks, a step that exceeds its limit, a transfer backend that has failed, or an internal
failure changes the state.
"""

import asyncio
from collections.abc import Callable
from random import Random

from baton.core.cluster.worker_report import WorkerState
from baton.core.errors import BatonError, Code, Failure, Reason
from baton.core.ids import WorkerRef
from baton.engine.loop import EngineLoop
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.runtime.observability.health import Health
from baton.transfer.owner.owner_service import OwnerService
from baton.transfer.reader.kv_reader import KvReader
from baton.worker.background_tasks import FirstFailure
from baton.worker.jobs.job_table import JobTable
from baton.worker.quarantine_limit import QuarantineLimit
from baton.worker.sessions.gateway_sessions import Sessions

log = get_logger(__name__)

UNHEALTHY_REPORT_S = 1.0
"""Time that an unhealthy worker keeps its report streams open, so that schedulers receive the state."""
CHECKS_PER_HEARTBEAT = 10
"""Checks per heartbeat for a stuck step, failed transfers, the quarantine limit, and the end of a drain."""


class WorkerUnhealthy(BatonError):
    """The worker must not serve any more, because its device or its code has failed.

    The process exits and is restarted.
    """


class WorkerNeedsReplacement(WorkerUnhealthy):
    """The worker drained and lost no request, but only a new process gets all of its memory back."""


class WorkerLifecycle:
    """State machine of one worker. Only this class changes `state`.

    failure: the first error that makes the worker unhealthy
    on_change: called after each change of a reported field
    is_to_be_replaced: the worker drains because of its quarantined blocks, so another one must take its place
    node_shutting_down: the worker drains because its machine is shutting down
    """

    def __init__(
        self,
        worker: WorkerRef,
        config: WorkerConfig,
        *,
        failure: FirstFailure,
        health: Health,
        jobs: JobTable,
        sessions: Sessions,
        owner: OwnerService,
        reader: KvReader,
        engine_loop: EngineLoop,
        rng: Random,
        on_change: Callable[[], None],
    ) -> None:
        self.state = WorkerState.STARTING
        self.is_to_be_replaced = False
        self.node_shutting_down = False
        self._worker = worker
        self._config = config
        self._failure = failure
        self._health = health
        self._jobs = jobs
        self._sessions = sessions
        self._owner = owner
        self._reader = reader
        self._engine_loop = engine_loop
        self._on_change = on_change
        self._quarantine_limit = QuarantineLimit(drain_s=config.drain_s, rng=rng)
        self._drain_until_s: float | None = None
        self._leases_until_s: float | None = None

    @property
    def needs_replacement(self) -> bool:
        """True while the worker asks the schedulers to replace it."""
        return self._quarantine_limit.needs_replacement

    def move_to(self, state: WorkerState) -> None:
        """Set the state and report it."""
        self.state = state
        self._on_change()

    def drain(self, *, node_shutting_down: bool = False) -> None:
        """Stop taking jobs and begin to drain.

        See `Worker.drain`. Does nothing if the worker drains already.
        """
        if node_shutting_down:  # also for a worker that drains already: its replacement must not start on this node
            self.node_shutting_down, self.is_to_be_replaced = True, False
        if self.state not in (WorkerState.STARTING, WorkerState.READY):
            return
        log.info(
            "drain_started",
            worker=str(self._worker),
            open_jobs=self._jobs.num_open,
            open_leases=self._owner.open_leases,
        )
        self._drain_until_s = asyncio.get_running_loop().time() + self._config.drain_s
        self._jobs.refuse(draining(self._config.drain_s))
        self._health.drain()
        self.move_to(WorkerState.DRAINING)

    def accept_replacement(self) -> None:
        """Drain if the worker still needs replacement.

        Its quarantined blocks may have been freed meanwhile.
        """
        if self._quarantine_limit.needs_replacement:
            self._drain_to_be_replaced()

    async def shut_down_unhealthy(self, problem: BaseException) -> None:
        """Report UNHEALTHY and end all gateway sessions, so that gateways place their requests elsewhere
        now."""
        log.critical(
            "worker_unhealthy",
            worker=str(self._worker),
            problem=f"{type(problem).__name__}: {problem}",
            exc_info=problem,
        )
        self._health.fail(str(problem))
        self.move_to(WorkerState.UNHEALTHY)
        self._sessions.close()
        await asyncio.sleep(min(UNHEALTHY_REPORT_S, self._config.heartbeat_s))

    async def run(self) -> None:
        """Send heartbeats; check for a stuck step, failed transfers, too much quarantine, and a drain's end.

        Never returns.
        """
        loop, heartbeat_s = asyncio.get_running_loop(), self._config.heartbeat_s
        next_heartbeat_s = loop.time()
        while True:
            step_age_s = self._engine_loop.step_age_s()
            if loop.time() >= next_heartbeat_s:
                next_heartbeat_s = loop.time() + heartbeat_s
                self._sessions.heartbeat(
                    steps_done=self._engine_loop.steps_done,
                    step_age_s=step_age_s,
                    draining=self.state is WorkerState.DRAINING,
                )
            if step_age_s > self._config.step_limit_s:
                self._failure.set(
                    WorkerUnhealthy(
                        f"a step has run for {step_age_s:.1f} s; the limit is {self._config.step_limit_s:g} s"
                    )
                )
            if self._reader.transfer_failure is not None:
                self._failure.set(WorkerUnhealthy(f"KV transfers have stopped: {self._reader.transfer_failure}"))
            if self.state is WorkerState.READY:
                self._check_quarantine(loop.time())
            if self.state is WorkerState.DRAINING:
                self._check_drain(loop.time())
            await asyncio.sleep(heartbeat_s / CHECKS_PER_HEARTBEAT)

    def _check_quarantine(self, now_s: float) -> None:
        needed_replacement = self._quarantine_limit.needs_replacement
        if self._quarantine_limit.update(
            is_over_limit=self._reader.needs_replacement,
            num_quarantined_blocks=self._reader.quarantined_blocks,
            now_s=now_s,
        ):
            self._drain_to_be_replaced()
        if self._quarantine_limit.needs_replacement != needed_replacement:
            self._on_change()

    def _drain_to_be_replaced(self) -> None:
        if self.state is WorkerState.READY:
            self.is_to_be_replaced = True
            self.drain()

    def _check_drain(self, now_s: float) -> None:
        """Stop open jobs at the drain deadline; end the engine loop once no peer or gateway needs this
        worker."""
        if self._jobs.num_open:
            if self._drain_until_s is not None and now_s >= self._drain_until_s:
                self._jobs.stop_all(draining(0.0))
            return
        if self._leases_until_s is None:
            self._leases_until_s = now_s + max(self._config.lease_s, self._config.kv_claim_timeout_s)
        is_needed = self._owner.open_leases > 0 or not self._sessions.are_settled
        if not is_needed or now_s >= self._leases_until_s:
            self._engine_loop.drain()


def draining(retry_after_s: float) -> Failure:
    """Return the failure for a job that a draining worker does not take or finish."""
    return Failure(
        code=Code.UNAVAILABLE,
        reason=Reason.DRAINING,
        message="this worker is draining; place the request on another worker",
        retry_after_s=retry_after_s or None,
        retriable=True,
    )
