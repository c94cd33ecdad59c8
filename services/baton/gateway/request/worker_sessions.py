"""Sessions of this gateway with all workers, one for each worker incarnation.

A session opens when the worker is first seen or needed, and stays open as long as the worker is listed.
"""

import asyncio
import math
from collections.abc import Callable, Iterable
from random import Random

from baton.core.cluster.placement import Placement
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import Incarnation, WorkerRef
from baton.core.interfaces import Network
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.gateway.cluster.attempt_errors import AttemptFailed, WorkerLost
from baton.gateway.cluster.worker_session import SessionTimes, WorkerSession
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.job_streams import JobStreams


class WorkerSessions:
    """Opens the jobs of attempts over the sessions with their workers."""

    def __init__(
        self,
        network: Network,
        *,
        gateway_id: str,
        tokenizer_fingerprint: str,
        times: SessionTimes,
        rng: Random,
        awake_clock: Callable[[], float] | None = None,
    ) -> None:
        self._network = network
        self._gateway_id = gateway_id
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._times = times
        self._rng = rng
        self._awake_clock = awake_clock
        self._sessions: dict[Incarnation, WorkerSession] = {}
        self._ended_s: dict[Incarnation, float] = {}
        self._is_closed = False

    def open(self, attempt: Attempt, placement: Placement, delivery: Delivery) -> JobStreams:
        """Return the streams of both jobs; `async with` sends the jobs.

        Raises AttemptFailed if the placement names no worker.
        """
        prefill, decode = attempt.jobs(placement, asyncio.get_running_loop().time())
        jobs: list[tuple[WorkerSession, PrefillJob | DecodeJob]] = []
        if prefill is not None and placement.prefill is not None:
            jobs.append((self.session(placement.prefill), prefill))
        if decode is not None and placement.decode is not None:
            jobs.append((self.session(placement.decode), decode))
        if not jobs:
            message = f"the scheduler {placement.scheduler_id} returned a placement without workers; retry"
            raise AttemptFailed(Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message, retriable=True))
        return JobStreams(delivery, attempt.request.deadline_s, jobs)

    def session(self, worker: WorkerRef) -> WorkerSession:
        """Return the session with this incarnation, and open it if needed. Raises Refused after `aclose`."""
        if self._is_closed:
            message = "this gateway has stopped; send the request to another gateway"
            raise Refused(Failure(code=Code.UNAVAILABLE, reason=Reason.DRAINING, message=message, retry_after_s=1.0))
        session = self._sessions.get(worker.incarnation)
        if session is None or session.has_ended:
            session = self._sessions[worker.incarnation] = WorkerSession(
                worker,
                self._network,
                gateway_id=self._gateway_id,
                session_id=self._rng.randbytes(8).hex(),
                tokenizer_fingerprint=self._tokenizer_fingerprint,
                times=self._times,
                on_end=self._remove,
                awake_clock=self._awake_clock,
            )
        return session

    def find(self, worker: WorkerRef) -> WorkerSession | None:
        """Return the open session with this incarnation; None if there is none."""
        return self._sessions.get(worker.incarnation)

    def update_workers(self, workers: Iterable[WorkerRef]) -> None:
        """Set the workers that exist now.

        Sessions with new workers open before a request needs them. Idle sessions with other workers end.
        """
        if self._is_closed:
            return
        now_s = asyncio.get_running_loop().time()
        wanted = {worker.incarnation: worker for worker in workers}
        self._ended_s = {key: ended_s for key, ended_s in self._ended_s.items() if key in wanted}
        for key, worker in wanted.items():
            # A worker that cannot be reached is dialled at most once per heartbeat.
            if now_s - self._ended_s.get(key, -math.inf) >= self._times.heartbeat_s:
                self.session(worker)
        for key, session in tuple(self._sessions.items()):
            if key not in wanted and not session.num_jobs:
                session.close()

    async def confirm_alive(self, placement: Placement) -> None:
        """Wait until the workers of a placement have sent a message.

        Raises AttemptFailed if one of them is lost. It takes at most the detection time of a silent worker.
        """
        workers = [worker for worker in (placement.prefill, placement.decode) if worker is not None]
        try:
            await asyncio.gather(*(self.session(worker).next_message() for worker in workers))
        except WorkerLost as loss:
            raise AttemptFailed(loss.failure, blamed=loss.worker, dead=loss.worker if loss.has_died else None) from loss

    async def aclose(self) -> None:
        """End all sessions. The workers cancel the jobs after their grace time."""
        self._is_closed = True
        await asyncio.gather(*(session.aclose() for session in tuple(self._sessions.values())))

    def _remove(self, session: WorkerSession) -> None:
        key = session.worker.incarnation
        if self._sessions.get(key) is session:
            del self._sessions[key]
            self._ended_s[key] = asyncio.get_running_loop().time()
