"""Session with one incarnation of a worker: sends jobs, receives tokens, and resumes after a broken stream.

The worker counts as lost if it cannot be dialled, has restarted, no longer knows the session, or was silent
for `detection_s`. The listener of every open job is then notified. Worker messages are numbered without gaps.
A message that was received before is dropped, and a gap breaks the stream, so that the worker sends it again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from baton.core.errors import Failure, Reason, StreamBroken
from baton.core.ids import JobId, WorkerRef
from baton.core.interfaces import Duplex, Network
from baton.core.messages.jobs import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    DecodeJob,
    GatewayMessage,
    Heartbeat,
    Ping,
    PrefillJob,
    SessionHello,
    SessionHelloReply,
    Step,
    WorkerMessage,
)
from baton.core.request import TokenDelta
from baton.gateway.cluster.attempt_errors import WorkerLost
from baton.runtime.logging import get_logger

log = get_logger(__name__)

Stream = Duplex[GatewayMessage, WorkerMessage]

MAX_STREAMS_WITHOUT_PROGRESS = 3
"""Number of streams in a row that may break without a new message. After one more, the worker counts as
lost."""
ACK_EVERY = 32
"""Number of worker messages after which an Ack is sent, unless a heartbeat came first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTimes:
    """Intervals and timeouts of a session.

    heartbeat_s: interval of pings.
    detection_s: silence after which the worker counts as lost.
    stuck_s: age of a step after which the worker counts as lost, although it still sends heartbeats. Workers
        detect this earlier themselves, so this limit is for those that do not.
    """

    heartbeat_s: float
    detection_s: float
    stuck_s: float


class JobListener(Protocol):
    """Receives the events of one job. No method is called after `failed` or `lost`."""

    def deliver(self, delta: TokenDelta) -> None:
        """Take new tokens."""
        ...

    def failed(self, failure: Failure) -> None:
        """The worker ended the job with a failure."""
        ...

    def lost(self, loss: WorkerLost, *, was_sent: bool) -> None:
        """The worker is lost. `was_sent` is True if it may have received the job."""
        ...


class _OpenJob:
    """A job whose last message has not arrived. `listener` is None once the job was cancelled.

    The job stays open until then even if all its samples have ended here, because a cancel of some of them
    may be lost with its stream, and is then sent again.
    """

    __slots__ = ("cancels", "deadline_s", "listener", "message", "was_sent")

    def __init__(self, message: PrefillJob | DecodeJob, listener: JobListener, now_s: float) -> None:
        self.message = message
        self.listener: JobListener | None = listener
        self.deadline_s = now_s + message.deadline_s
        self.was_sent = False
        self.cancels: list[Cancel] = []


class WorkerSession:
    """Session with one incarnation of a worker. Calls `on_end(self)` once, when the session has ended."""

    def __init__(
        self,
        worker: WorkerRef,
        network: Network,
        *,
        gateway_id: str,
        session_id: str,
        tokenizer_fingerprint: str,
        times: SessionTimes,
        on_end: Callable[["WorkerSession"], None],
        awake_clock: Callable[[], float] | None = None,
    ) -> None:
        """Open the session in the background.

        awake_clock: clock for the silence of the worker and for dials, see `AwakeClock`; None uses the event
            loop's.
        """
        self.worker = worker
        self.has_ended = False
        self._network = network
        self._gateway_id = gateway_id
        self.session_id = session_id
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._times = times
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._awake_s = awake_clock or self._loop.time
        self._jobs: dict[JobId, _OpenJob] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._stream: Stream | None = None
        self._was_connected = False
        self._last_seq = 0
        self._num_unacknowledged = 0
        self._num_streams_without_progress = 0
        self._last_message_s = self._awake_s()
        self._silence_timer = self._loop.call_later(times.detection_s, self._check_silence)
        self._ping_timer = self._loop.call_later(times.heartbeat_s, self._ping)
        self._task = self._loop.create_task(self._run(), name=f"session-{worker.worker_id}")

    @property
    def num_jobs(self) -> int:
        """Number of jobs whose last message has not arrived."""
        return len(self._jobs)

    @property
    def is_connected(self) -> bool:
        """True while a stream is open and the worker has answered its hello."""
        return self._stream is not None

    def wanted_samples(self, job: JobId) -> frozenset[int]:
        """Return the samples of a job that were not cancelled; none once the job has ended or was cancelled.

        A sample that has ended by itself counts until the whole job has ended.
        """
        open_job = self._jobs.get(job)
        if open_job is None or open_job.listener is None:
            return frozenset()
        return frozenset(open_job.message.sample_indices).difference(*(c.sample_indices for c in open_job.cancels))

    def open(self, job: PrefillJob | DecodeJob, listener: JobListener) -> None:
        """Send a job to the worker, now or as soon as the stream is open. `listener` gets its events.

        Raises WorkerLost if the session has ended.
        """
        if self.has_ended:
            raise WorkerLost(self.worker, Reason.WORKER_LOST, "its session has ended", has_died=False)
        self._jobs[job.job] = open_job = _OpenJob(job, listener, self._loop.time())
        if self._stream is not None:
            open_job.was_sent = True
            self._send(job)

    def cancel(self, job: JobId, reason: Reason, sample_indices: tuple[int, ...] = ()) -> None:
        """Cancel these samples of a job, or the complete job if `sample_indices` is empty.

        The listener gets no further events for a cancelled job. Unknown and ended jobs are ignored.
        """
        open_job = self._jobs.get(job)
        if open_job is None or open_job.listener is None:
            return
        cancel = Cancel(job=job, reason=reason, sample_indices=sample_indices)
        open_job.cancels.append(cancel)
        if not sample_indices:
            open_job.listener = None
            if not open_job.was_sent:  # the worker does not know the job
                del self._jobs[job]
        self._send(cancel)

    async def next_message(self) -> None:
        """Wait for the worker's next message. Raises WorkerLost if the session ends before."""
        if self.has_ended:
            raise WorkerLost(self.worker, Reason.WORKER_LOST, "its session has ended", has_died=False)
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def close(self) -> None:
        """End the session. Listeners of open jobs get `lost`. The stream closes in the background."""
        self._task.cancel()
        self._end(WorkerLost(self.worker, Reason.WORKER_LOST, "the session was closed", has_died=False))

    async def aclose(self) -> None:
        """End the session as `close` does, and wait until the stream is closed."""
        self.close()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        try:
            while True:
                opened_s = self._loop.time()
                try:
                    await self._serve()
                except StreamBroken as broken:
                    log.info("session_broken", worker=str(self.worker), problem=str(broken), last_seq=self._last_seq)
                    self._num_streams_without_progress += 1
                    if self._num_streams_without_progress > MAX_STREAMS_WITHOUT_PROGRESS:
                        problem = f"{self._num_streams_without_progress} streams in a row broke: {broken}"
                        reason = broken.failure.reason if broken.failure else Reason.WORKER_LOST
                        raise WorkerLost(self.worker, reason, problem, has_died=False) from broken
                if self._loop.time() - opened_s < self._times.heartbeat_s:
                    await asyncio.sleep(self._times.heartbeat_s / 4)  # do not spin on streams that break immediately
        except WorkerLost as loss:
            self._end(loss)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("session_failed", worker=str(self.worker))
            self._end(WorkerLost(self.worker, Reason.INTERNAL, f"{type(error).__name__}: {error}", has_died=False))

    async def _serve(self) -> None:
        """Open one stream and receive from it until it breaks."""
        stream = await self._connect()
        try:
            await self._receive(stream)
        finally:
            self._stream = None
            await stream.aclose()

    async def _connect(self) -> Stream:
        """Dial the worker, exchange hellos, and send open jobs again.

        Raises WorkerLost if the worker cannot be reached or its reply does not fit, and StreamBroken if the
        stream breaks before the reply.
        """
        dialled_s = self._awake_s()
        try:
            stream = await self._network.open_session(self.worker.address)
        except StreamBroken as broken:
            # A refused connection fails immediately and means that no process listens there. A dial to an
            # unreachable host takes until its timeout.
            was_refused = self._awake_s() - dialled_s < self._times.detection_s / 2
            reason = broken.failure.reason if broken.failure else Reason.WORKER_LOST
            raise WorkerLost(self.worker, reason, f"cannot be reached: {broken}", has_died=was_refused) from broken
        try:
            stream.send(
                SessionHello(
                    gateway_id=self._gateway_id,
                    session_id=self.session_id,
                    last_seq=self._last_seq,
                    expected=self.worker,
                )
            )
            self._check_reply(await stream.receive())
        except BaseException:
            await stream.aclose()
            raise
        self._was_connected = True
        self._last_message_s = self._awake_s()
        self._stream = stream
        self._resend_open_jobs()
        return stream

    def _check_reply(self, reply: WorkerMessage) -> None:
        problem = ""
        if not isinstance(reply, SessionHelloReply):
            reason, problem = Reason.INTERNAL, f"it replied to SessionHello with {type(reply).__name__}"
        elif reply.protocol_version != PROTOCOL_VERSION:
            reason, problem = (
                Reason.PROTOCOL_VERSION,
                f"its protocol version is {reply.protocol_version}, this gateway's is {PROTOCOL_VERSION}",
            )
        elif not reply.worker.is_same_incarnation(self.worker):
            raise WorkerLost(self.worker, Reason.WRONG_EPOCH, f"its address now serves {reply.worker}", has_died=True)
        elif reply.layout.tokenizer_fingerprint != self._tokenizer_fingerprint:
            reason = Reason.LAYOUT_MISMATCH
            problem = (
                f"its tokenizer_fingerprint is {reply.layout.tokenizer_fingerprint}, "
                f"this gateway's is {self._tokenizer_fingerprint}"
            )
        elif self._was_connected and not (reply.resumed and reply.oldest_seq <= self._last_seq + 1):
            reason, problem = Reason.WORKER_LOST, "it no longer knows the session"
        else:
            return
        raise WorkerLost(self.worker, reason, problem, has_died=False)

    def _resend_open_jobs(self) -> None:
        """Send every open job and its cancels again. The worker ignores those whose JobId it already
        knows."""
        now_s = self._loop.time()
        for job in self._jobs.values():
            job.was_sent = True
            self._send(replace(job.message, deadline_s=max(0.0, job.deadline_s - now_s)))
            for cancel in job.cancels:
                self._send(cancel)

    async def _receive(self, stream: Stream) -> None:
        while True:
            message = await stream.receive()
            self._last_message_s = self._awake_s()
            if isinstance(message, SessionHelloReply):
                raise StreamBroken("the worker sent a second SessionHelloReply")
            if message.seq <= self._last_seq:
                continue
            if message.seq != self._last_seq + 1:
                raise StreamBroken(f"message {message.seq} came after {self._last_seq}")
            self._last_seq = message.seq
            self._end_waiting(None)
            self._num_streams_without_progress = 0
            self._num_unacknowledged += 1
            if isinstance(message, Step):
                self._take_step(message)
            else:
                self._take_heartbeat(message)
            if self._num_unacknowledged >= ACK_EVERY:
                self._acknowledge()

    def _end_waiting(self, loss: WorkerLost | None) -> None:
        """Wake up those who wait for a message."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if loss is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(loss)

    def _take_step(self, step: Step) -> None:
        for delta in step.deltas:
            job = self._jobs.get(delta.job)
            if job is None:
                continue
            if delta.is_last:
                del self._jobs[delta.job]
            if job.listener is not None:
                job.listener.deliver(delta)
        for failed in step.failures:
            job = self._jobs.pop(failed.job, None)
            if job is not None and job.listener is not None:
                job.listener.failed(failed.failure)

    def _take_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._acknowledge()
        if heartbeat.step_age_s > self._times.stuck_s:
            message = f"its step has run for {heartbeat.step_age_s:.1f} s"
            raise WorkerLost(self.worker, Reason.WORKER_LOST, message, has_died=False)

    def _acknowledge(self) -> None:
        self._num_unacknowledged = 0
        self._send(Ack(seq=self._last_seq))

    def _send(self, message: GatewayMessage) -> None:
        """Send a message if the stream is open. Messages that a broken stream loses are sent again later.

        A broken stream is handled by the receiving side, which sees it break too.
        """
        if self._stream is not None:
            try:
                self._stream.send(message)
            except StreamBroken:
                self._stream = None

    def _ping(self) -> None:
        self._send(Ping())
        expired_s = self._loop.time() - self._times.detection_s
        for job in [id_ for id_, job in self._jobs.items() if job.listener is None and job.deadline_s < expired_s]:
            del self._jobs[job]  # it was cancelled, but the worker never confirmed its end
        self._ping_timer = self._loop.call_later(self._times.heartbeat_s, self._ping)

    def _check_silence(self) -> None:
        silence_s = self._awake_s() - self._last_message_s
        if silence_s < self._times.detection_s:
            self._silence_timer = self._loop.call_later(self._times.detection_s - silence_s, self._check_silence)
            return
        self._task.cancel()
        self._end(
            WorkerLost(self.worker, Reason.WORKER_LOST, f"it sent no message for {silence_s:.1f} s", has_died=False)
        )

    def _end(self, loss: WorkerLost) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self._stream = None
        self._silence_timer.cancel()
        self._ping_timer.cancel()
        jobs, self._jobs = self._jobs, {}
        level = log.warning if jobs else log.info
        level("worker_session_ended", worker=str(self.worker), problem=str(loss), open_jobs=len(jobs))
        self._on_end(self)
        self._end_waiting(loss)
        for job in jobs.values():
            if job.listener is not None:
                job.listener.lost(loss, was_sent=job.was_sent)
