"""All standing sessions of this gateway: one a worker life, opened when first needed or seen, kept while the
worker is there."""

import asyncio
import math
from collections.abc import Iterable
from random import Random

from baton.core.cluster.placement import Placement
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import WorkerRef
from baton.core.interfaces import Network
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.gateway.cluster.attempt_errors import LegLost
from baton.gateway.cluster.worker_session import SessionTimes, WorkerSession
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.job_streams import JobStreams

_Life = tuple[str, int]


class WorkerSessions:
    """Opens both jobs of an attempt at once, each over its worker's session."""

    def __init__(
        self, network: Network, *, gateway_id: str, tokenizer_fingerprint: str, times: SessionTimes, rng: Random
    ) -> None:
        self._network = network
        self._gateway_id = gateway_id
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._times = times
        self._rng = rng
        self._sessions: dict[_Life, WorkerSession] = {}
        self._ended_s: dict[_Life, float] = {}
        self._is_closed = False

    def open(self, attempt: Attempt, placement: Placement, progress: Delivery) -> JobStreams:
        """Both legs; `async with` sends the jobs. Raises LegLost for a placement that names nobody."""
        prefill, decode = attempt.jobs(placement, asyncio.get_running_loop().time())
        jobs: list[tuple[WorkerSession, PrefillJob | DecodeJob]] = []
        if prefill is not None and placement.prefill is not None:
            jobs.append((self.session(placement.prefill), prefill))
        if decode is not None and placement.decode is not None:
            jobs.append((self.session(placement.decode), decode))
        if not jobs:
            message = f"the scheduler {placement.scheduler_id} placed the request nowhere"
            raise LegLost(Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message, retriable=True))
        return JobStreams(progress, attempt.request.deadline_s, jobs)

    def session(self, worker: WorkerRef) -> WorkerSession:
        """The session with this life of the worker. Raises Refused once this gateway has ended its
        sessions."""
        if self._is_closed:
            message = "this gateway has stopped; send the request to another one"
            raise Refused(Failure(code=Code.UNAVAILABLE, reason=Reason.DRAINING, message=message, retry_after_s=1.0))
        life = (worker.worker_id, worker.worker_epoch)
        session = self._sessions.get(life)
        if session is None or session.has_ended:
            session = self._sessions[life] = WorkerSession(
                worker,
                self._network,
                gateway_id=self._gateway_id,
                session_id=self._rng.randbytes(8).hex(),
                tokenizer_fingerprint=self._tokenizer_fingerprint,
                times=self._times,
                on_end=self._forget,
            )
        return session

    def keep(self, lives: Iterable[WorkerRef]) -> None:
        """The workers that are there now: new ones are dialled before a request needs them, sessions with
        others end once idle."""
        if self._is_closed:
            return
        now_s = asyncio.get_running_loop().time()
        wanted = {(worker.worker_id, worker.worker_epoch): worker for worker in lives}
        self._ended_s = {life: ended_s for life, ended_s in self._ended_s.items() if life in wanted}
        for life, worker in wanted.items():
            if (
                now_s - self._ended_s.get(life, -math.inf) >= self._times.heartbeat_s
            ):  # not again and again while it cannot be reached
                self.session(worker)
        for life, session in tuple(self._sessions.items()):
            if life not in wanted and not session.num_jobs:
                session.close()

    @property
    def num_up(self) -> int:
        return sum(session.is_up for session in self._sessions.values())

    async def aclose(self) -> None:
        """End all sessions; workers cancel their jobs after their grace."""
        self._is_closed = True
        await asyncio.gather(*(session.aclose() for session in tuple(self._sessions.values())))

    def _forget(self, session: WorkerSession) -> None:
        life = (session.worker.worker_id, session.worker.worker_epoch)
        if self._sessions.get(life) is session:
            del self._sessions[life]
            self._ended_s[life] = asyncio.get_running_loop().time()
