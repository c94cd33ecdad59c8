"""One life of a worker: the state it is in, and what moves it on: a drain, wear, a step that does not end, a
failure."""

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
from baton.worker.jobs.job_table import JobTable
from baton.worker.quarantine_limit import QuarantineLimit
from baton.worker.sessions.gateway_sessions import Sessions

log = get_logger(__name__)

LAST_WORDS_S = 1.0
"""How long an unhealthy worker stays to say so."""
LOOKS_A_HEARTBEAT = 10
"""How often a worker looks after itself: whether its step is stuck, whether its drain is done."""


class WorkerUnhealthy(BatonError):
    """The worker must not serve any more: its device or its own code is at fault. The process exits, and is
    started anew."""


class WorkerNeedsReplacement(WorkerUnhealthy):
    """It has drained by itself, and lost nothing, but only a new process has all of its memory again."""


class WorkerLifecycle:
    """`state` changes here only; `on_change` is called after each change of what a report says of it.
    `failed` gets the first failure.

    `is_to_be_replaced`: it leaves because it is worn out, not because nobody wants it any more.
    `node_shutting_down`: its machine is about to end.
    """

    def __init__(
        self,
        worker: WorkerRef,
        config: WorkerConfig,
        *,
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
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._worker = worker
        self._config = config
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
        """It asks to be let go."""
        return self._quarantine_limit.asks

    def become(self, state: WorkerState) -> None:
        self.state = state
        self._on_change()

    def fail(self, error: BaseException) -> None:
        """The first failure decides."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def drain(self, *, node_shutting_down: bool = False) -> None:
        """See `Worker.drain`."""
        if node_shutting_down:  # said of one that leaves already, too: nobody shall replace it there
            self.node_shutting_down, self.is_to_be_replaced = True, False
        if self.state not in (WorkerState.STARTING, WorkerState.READY):
            return
        log.info(
            "worker_drains",
            worker=str(self._worker),
            open_jobs=self._jobs.num_open,
            open_leases=self._owner.open_leases,
        )
        self._drain_until_s = asyncio.get_running_loop().time() + self._config.drain_s
        self._jobs.refuse(draining(self._config.drain_s))
        self._health.drain()
        self.become(WorkerState.DRAINING)

    def let_go(self) -> None:
        """It is its turn to leave, if it is still worn out: its memory may have come back meanwhile."""
        if self._quarantine_limit.asks:
            self._leave()

    async def say_unhealthy(self, problem: BaseException) -> None:
        """No healthy zombies: streams end, so that gateways go elsewhere at once, and schedulers hear why."""
        log.critical(
            "worker_unhealthy",
            worker=str(self._worker),
            problem=f"{type(problem).__name__}: {problem}",
            exc_info=problem,
        )
        self._health.fail(str(problem))
        self.become(WorkerState.UNHEALTHY)
        self._sessions.close()
        await asyncio.sleep(min(LAST_WORDS_S, self._config.heartbeat_s))

    async def look_after(self) -> None:
        """Heartbeats, and what a worker must notice by itself: a step that does not end, too much quarantine,
        the end of its drain."""
        loop, heartbeat_s = asyncio.get_running_loop(), self._config.heartbeat_s
        next_beat_s = loop.time()
        while True:
            step_age_s = self._engine_loop.step_age_s()
            if loop.time() >= next_beat_s:
                next_beat_s = loop.time() + heartbeat_s
                self._sessions.heartbeat(
                    steps_done=self._engine_loop.steps_done,
                    step_age_s=step_age_s,
                    draining=self.state is WorkerState.DRAINING,
                )
            if step_age_s > self._config.step_limit_s:
                self.fail(
                    WorkerUnhealthy(
                        f"a step has run for {step_age_s:.1f} s; the limit is {self._config.step_limit_s:g} s"
                    )
                )
            if self.state is WorkerState.READY:
                self._check_quarantine(loop.time())
            if self.state is WorkerState.DRAINING:
                self._go_on_draining(loop.time())
            await asyncio.sleep(heartbeat_s / LOOKS_A_HEARTBEAT)

    def _check_quarantine(self, now_s: float) -> None:
        asked = self._quarantine_limit.asks
        if self._quarantine_limit.look(
            needs_replacement=self._reader.must_drain, num_blocks=self._reader.quarantined_blocks, now_s=now_s
        ):
            self._leave()
        if self._quarantine_limit.asks != asked:
            self._on_change()

    def _leave(self) -> None:
        """Drain for its own sake: whoever looks after this worker starts another one."""
        if self.state is WorkerState.READY:
            self.is_to_be_replaced = True
            self.drain()

    def _go_on_draining(self, now_s: float) -> None:
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
    return Failure(
        code=Code.UNAVAILABLE,
        reason=Reason.DRAINING,
        message="this worker is leaving; another one has to take the request",
        retry_after_s=retry_after_s or None,
        retriable=True,
    )
