"""One standing session with one life of a worker: jobs go down, tokens come up, and a broken stream is
resumed as if nothing had been.

The worker is lost at once when it cannot be dialled, is another life, or no longer knows the session; and
after `detection_s` of silence. Then every open leg is told. Messages arrive in order, numbered without gaps;
what came before is dropped, and a gap breaks the stream.
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

MAX_FRUITLESS_STREAMS = 3
"""Streams in a row that break before they have brought one new message, after which the worker is lost."""
ACK_EVERY = 32
"""Worker messages after which they are acknowledged, if no heartbeat came before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTimes:
    """`detection_s`: silence after which a worker is lost. `stuck_s`: age of a step after which its worker is
    lost though it still talks; workers notice earlier themselves, so this is for those that do not."""

    heartbeat_s: float
    detection_s: float
    stuck_s: float


class JobListener(Protocol):
    """Who waits for a job's tokens. Nothing is called after `failed` or `lost`. `was_sent`: the worker may
    have had the job."""

    def deliver(self, delta: TokenDelta) -> None: ...

    def failed(self, failure: Failure) -> None: ...

    def lost(self, loss: WorkerLost, *, was_sent: bool) -> None: ...


class _OpenJob:
    """A job whose last message has not come. `leg` None: nobody waits any more, it was cancelled."""

    __slots__ = ("cancels", "deadline_s", "leg", "message", "one_delta_each", "remaining", "was_sent")

    def __init__(self, message: PrefillJob | DecodeJob, leg: JobListener, now_s: float) -> None:
        self.message = message
        self.leg: JobListener | None = leg
        self.deadline_s = now_s + message.deadline_s
        self.remaining = set(message.sample_indices)
        self.one_delta_each = isinstance(message, PrefillJob)
        self.was_sent = False
        self.cancels: list[Cancel] = []


class WorkerSession:
    """`on_end(self)` is called once, when the worker is lost or the session was closed."""

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
    ) -> None:
        self.worker = worker
        self.has_ended = False
        self._network = network
        self._gateway_id = gateway_id
        self._session_id = session_id
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._times = times
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[JobId, _OpenJob] = {}
        self._stream: Stream | None = None
        self._was_up = False
        self._last_seq = 0
        self._num_unacknowledged = 0
        self._num_fruitless = 0
        self._heard_s = self._loop.time()
        self._silence_due_s = self._heard_s + times.detection_s
        self._silence = self._loop.call_at(self._silence_due_s, self._check_silence)
        self._tick = self._loop.call_later(times.heartbeat_s, self._ping)
        self._task = self._loop.create_task(self._run(), name=f"session-{worker.worker_id}")

    @property
    def is_up(self) -> bool:
        return self._stream is not None

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def open(self, job: PrefillJob | DecodeJob, leg: JobListener) -> None:
        """Send a job, now or once the stream is there. Raises WorkerLost when the session has ended."""
        if self.has_ended:
            raise WorkerLost(self.worker, Reason.WORKER_LOST, "its session has ended", has_died=False)
        self._jobs[job.job] = open_job = _OpenJob(job, leg, self._loop.time())
        if self._stream is not None:
            open_job.was_sent = True
            self._send(job)

    def cancel(self, job: JobId, reason: Reason, sample_indices: tuple[int, ...] = ()) -> None:
        """End these samples of a job, or all of it (empty). Its leg hears nothing more of them. Unknown and
        ended jobs are ignored."""
        open_job = self._jobs.get(job)
        if open_job is None or open_job.leg is None:
            return
        cancel = Cancel(job=job, reason=reason, sample_indices=sample_indices)
        open_job.cancels.append(cancel)
        open_job.remaining.difference_update(sample_indices)
        if not sample_indices:
            open_job.leg = None
            if not open_job.was_sent:  # the worker never heard of it
                del self._jobs[job]
        self._send(cancel)

    def close(self) -> None:
        """End the session; legs that are still open are told that the worker is lost. Its stream closes by
        itself."""
        self._task.cancel()
        self._end(WorkerLost(self.worker, Reason.WORKER_LOST, "the session was closed", has_died=False))

    async def aclose(self) -> None:
        """As `close`, and wait for the stream."""
        self.close()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        try:
            while True:
                up_s = self._loop.time()
                try:
                    await self._serve()
                except StreamBroken as broken:
                    log.info("session_broken", worker=str(self.worker), problem=str(broken), last_seq=self._last_seq)
                    self._num_fruitless += 1
                    if self._num_fruitless > MAX_FRUITLESS_STREAMS:
                        raise WorkerLost(
                            self.worker, Reason.WORKER_LOST, f"breaks every stream: {broken}", has_died=False
                        ) from broken
                if (
                    self._loop.time() - up_s < self._times.heartbeat_s
                ):  # do not spin on a stream that breaks at once, again and again
                    await asyncio.sleep(self._times.heartbeat_s / 4)
        except WorkerLost as loss:
            self._end(loss)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("session_failed", worker=str(self.worker))
            self._end(WorkerLost(self.worker, Reason.INTERNAL, f"{type(error).__name__}: {error}", has_died=False))

    async def _serve(self) -> None:
        """One stream, until it breaks."""
        stream = await self._connect()
        try:
            await self._receive(stream)
        finally:
            self._stream = None
            await stream.aclose()

    async def _connect(self) -> Stream:
        """Dial, agree, repeat what is open. Raises WorkerLost where nobody answers, StreamBroken where the
        stream breaks before that."""
        dialled_s = self._loop.time()
        try:
            stream = await self._network.open_session(self.worker.address)
        except StreamBroken as broken:
            # A dial that nobody answers takes its time; one that is refused comes back at once: no process is
            # there.
            was_refused = self._loop.time() - dialled_s < self._times.detection_s / 2
            reason = broken.failure.reason if broken.failure else Reason.WORKER_LOST
            raise WorkerLost(self.worker, reason, f"cannot be reached: {broken}", has_died=was_refused) from broken
        try:
            stream.send(
                SessionHello(
                    gateway_id=self._gateway_id,
                    session_id=self._session_id,
                    last_seq=self._last_seq,
                    expected=self.worker,
                )
            )
            self._check_reply(await stream.receive())
        except BaseException:
            await stream.aclose()
            raise
        self._was_up = True
        self._heard_s = self._loop.time()
        self._stream = stream
        self._repeat()
        return stream

    def _check_reply(self, reply: WorkerMessage) -> None:
        problem = ""
        if not isinstance(reply, SessionHelloReply):
            reason, problem = Reason.INTERNAL, f"answered a hello with {type(reply).__name__}"
        elif reply.protocol_version != PROTOCOL_VERSION:
            reason, problem = (
                Reason.PROTOCOL_VERSION,
                f"speaks protocol version {reply.protocol_version}, this gateway {PROTOCOL_VERSION}",
            )
        elif not reply.worker.is_same_incarnation(self.worker):
            raise WorkerLost(self.worker, Reason.WRONG_EPOCH, f"{reply.worker} is there now", has_died=True)
        elif reply.layout.tokenizer_fingerprint != self._tokenizer_fingerprint:
            reason = Reason.LAYOUT_MISMATCH
            problem = (
                f"tokenizer_fingerprint: {reply.layout.tokenizer_fingerprint} there, {self._tokenizer_fingerprint} here"
            )
        elif self._was_up and not (reply.resumed and reply.oldest_seq <= self._last_seq + 1):
            reason, problem = Reason.WORKER_LOST, "it no longer knows the session"
        else:
            return
        raise WorkerLost(self.worker, reason, problem, has_died=False)

    def _repeat(self) -> None:
        """Every open job and its cancels: the worker knows by the JobId what it has had already."""
        now_s = self._loop.time()
        for job in self._jobs.values():
            job.was_sent = True
            self._send(replace(job.message, deadline_s=max(0.0, job.deadline_s - now_s)))
            for cancel in job.cancels:
                self._send(cancel)

    async def _receive(self, stream: Stream) -> None:
        while True:
            message = await stream.receive()
            self._heard_s = self._loop.time()
            if isinstance(message, SessionHelloReply):
                raise StreamBroken("a second hello")
            if message.seq <= self._last_seq:
                continue
            if message.seq != self._last_seq + 1:
                raise StreamBroken(f"message {message.seq} came after {self._last_seq}")
            self._last_seq = message.seq
            self._num_fruitless = 0
            self._num_unacknowledged += 1
            if isinstance(message, Step):
                self._take_step(message)
            else:
                self._take_heartbeat(message)
            if self._num_unacknowledged >= ACK_EVERY:
                self._acknowledge()

    def _take_step(self, step: Step) -> None:
        for delta in step.deltas:
            job = self._jobs.get(delta.job)
            if job is None:
                continue
            if delta.finish is not None or job.one_delta_each:
                job.remaining.discard(delta.sample_index)
                if not job.remaining:
                    del self._jobs[delta.job]
            if job.leg is not None:
                job.leg.deliver(delta)
        for failed in step.failures:
            job = self._jobs.pop(failed.job, None)
            if job is not None and job.leg is not None:
                job.leg.failed(failed.failure)

    def _take_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._acknowledge()
        if heartbeat.step_age_s > self._times.stuck_s:
            message = f"its step runs for {heartbeat.step_age_s:.1f} s"
            raise WorkerLost(self.worker, Reason.WORKER_LOST, message, has_died=False)

    def _acknowledge(self) -> None:
        self._num_unacknowledged = 0
        self._send(Ack(seq=self._last_seq))

    def _send(self, message: GatewayMessage) -> None:
        """Over the stream, if there is one. What a broken stream loses is repeated; who receives on it sees
        it break."""
        if self._stream is not None:
            try:
                self._stream.send(message)
            except StreamBroken:
                self._stream = None

    def _ping(self) -> None:
        self._send(Ping())
        forgotten_s = self._loop.time() - self._times.detection_s
        for job in [id_ for id_, job in self._jobs.items() if job.leg is None and job.deadline_s < forgotten_s]:
            del self._jobs[job]  # cancelled, and the worker never said that it has ended
        self._tick = self._loop.call_later(self._times.heartbeat_s, self._ping)

    def _check_silence(self) -> None:
        now_s = self._loop.time()
        if now_s - self._silence_due_s > self._times.heartbeat_s:
            # This process stood still: what the worker said meanwhile still waits to be read.
            self._heard_s = max(self._heard_s, now_s - self._times.detection_s + self._times.heartbeat_s)
        self._silence_due_s = self._heard_s + self._times.detection_s
        if now_s < self._silence_due_s:
            self._silence = self._loop.call_at(self._silence_due_s, self._check_silence)
            return
        self._task.cancel()
        silence_s = now_s - self._heard_s
        self._end(
            WorkerLost(
                self.worker, Reason.WORKER_LOST, f"nothing was heard of it for {silence_s:.1f} s", has_died=False
            )
        )

    def _end(self, loss: WorkerLost) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self._stream = None
        self._silence.cancel()
        self._tick.cancel()
        jobs, self._jobs = self._jobs, {}
        level = log.warning if jobs else log.info
        level("worker_session_ended", worker=str(self.worker), problem=str(loss), open_jobs=len(jobs))
        self._on_end(self)
        for job in jobs.values():
            if job.leg is not None:
                job.leg.lost(loss, was_sent=job.was_sent)
