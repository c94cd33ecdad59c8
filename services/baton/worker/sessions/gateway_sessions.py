"""Long-lived sessions with gateways, which survive a broken stream.

A session outlives its stream by `session_grace_s`. A gateway that reconnects in time continues after its
`last_seq`. If it does not, or if it leaves too many messages unacknowledged, the session ends and its jobs
are cancelled. The unacknowledged messages of all sessions share an account of the memory budget; if it is
full, the session with the most bytes ends.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from baton.core.errors import BatonError, Failure, StreamBroken, invalid
from baton.core.ids import JobId, WorkerRef
from baton.core.interfaces import Duplex
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.jobs import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    DecodeJob,
    Heartbeat,
    JobFailure,
    Ping,
    PrefillJob,
    ReceivedGatewayMessage,
    RefusedJob,
    SessionHello,
    SessionHelloReply,
    Step,
    WorkerMessage,
)
from baton.core.request import TokenDelta
from baton.runtime.logging import get_logger
from baton.runtime.process.byte_budget import OverBudget
from baton.runtime.process.shared_account import SharedAccount
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.sessions.outbox import Outbox, OutboxFull

log = get_logger(__name__)

GatewayStream = Duplex[WorkerMessage, ReceivedGatewayMessage]

MAX_SESSIONS = 256
"""Most sessions of one worker, including those that wait for their gateway to reconnect."""
HELLO_LIMIT_S = 10.0
"""Time limit for the hello on a new stream."""


class SessionJobs(Protocol):
    """The part of the job table that sessions use."""

    def start(self, job: PrefillJob | DecodeJob, session: "GatewaySession") -> None:
        """Start a job."""
        ...

    def cancel(self, cancel: Cancel, session: "GatewaySession") -> None:
        """Cancel samples of a job."""
        ...

    def forget(self, jobs: Iterable[JobId], session: "GatewaySession") -> None:
        """Drop jobs of this session whose last message the gateway has acknowledged."""
        ...

    def drop_session(self, session: "GatewaySession") -> None:
        """Cancel and drop all jobs of the session, without further messages."""
        ...


class GatewaySession:
    """The session of one gateway.

    Messages that are queued in one iteration of the event loop, such as all outputs of an engine step, are
    sent as one `Step`. They are sent after the engine has launched its next step, so writing overlaps with
    computing.
    """

    def __init__(
        self,
        session_id: str,
        gateway_id: str,
        *,
        buffer_bytes: int,
        buffers: SharedAccount,
        on_overflow: Callable[["GatewaySession"], None],
    ) -> None:
        self.session_id = session_id
        self.gateway_id = gateway_id
        self.stream: GatewayStream | None = None
        self.grace: asyncio.TimerHandle | None = None
        self.has_ended = False
        self.outbox = Outbox(buffer_bytes)
        self._on_overflow = on_overflow
        self._buffer = buffers.open(self._overflowed)
        self._deltas: list[TokenDelta] = []
        self._failures: list[JobFailure] = []
        self._last_of: list[JobId] = []  # jobs whose last message is in the next Step
        self._unacknowledged: list[tuple[int, JobId]] = []  # (seq of its last message, job), by seq
        self._flush: asyncio.Handle | None = None

    def put_delta(self, delta: TokenDelta, *, is_last: bool) -> None:
        """Queue new tokens. `is_last`: they are the job's last message."""
        self._deltas.append(delta)
        if is_last:
            self._last_of.append(delta.job)
        self._schedule()

    def put_failure(self, job: JobId, failure: Failure) -> None:
        """Queue a failure, which is the job's last message."""
        self._failures.append(JobFailure(job=job, failure=failure))
        self._last_of.append(job)
        self._schedule()

    def flush(self) -> None:
        """Send everything that is queued as one message."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self.has_ended or not (self._deltas or self._failures):
            return
        message = Step(seq=self.outbox.next_seq, deltas=tuple(self._deltas), failures=tuple(self._failures))
        self._unacknowledged.extend((message.seq, job) for job in self._last_of)
        self._deltas, self._failures, self._last_of = [], [], []
        self._append(message)

    def heartbeat(self, *, steps_done: int, step_age_s: float, draining: bool) -> None:
        """Send a heartbeat with the step progress. Does nothing while the stream is broken."""
        if self.stream is not None:
            self._append(
                Heartbeat(seq=self.outbox.next_seq, steps_done=steps_done, step_age_s=step_age_s, draining=draining)
            )

    def acknowledge(self, seq: int) -> list[JobId]:
        """Drop messages up to `seq`, which the gateway has processed.

        Returns jobs whose last message is among them.
        """
        before = self.outbox.num_bytes
        self.outbox.acknowledge(seq)
        self._buffer.remove(before - self.outbox.num_bytes)
        done = [job for last_seq, job in self._unacknowledged if last_seq <= seq]
        self._unacknowledged = self._unacknowledged[len(done) :]
        return done

    def attach(self, stream: GatewayStream, reply: SessionHelloReply, last_seq: int) -> None:
        """Continue on `stream`: send the reply, then all messages after `last_seq`."""
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None
        self.stream = stream
        self._send(reply)
        for message in self.outbox.after(last_seq):
            self._send(message)

    def end(self) -> None:
        """Drop all queued messages and send nothing more."""
        self.has_ended = True
        self.stream = None
        self._buffer.close()
        for handle in (self.grace, self._flush):
            if handle is not None:
                handle.cancel()
        self.grace = self._flush = None
        self._deltas, self._failures, self._last_of, self._unacknowledged = [], [], [], []

    @property
    def is_settled(self) -> bool:
        """True if the gateway has acknowledged the last message of every ended job."""
        return not (self._deltas or self._failures or self._unacknowledged)

    def _schedule(self) -> None:
        if self._flush is None and not self.has_ended:
            self._flush = asyncio.get_running_loop().call_soon(self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._flush = None
        self.flush()

    def _append(self, message: Step | Heartbeat) -> None:
        try:
            self._buffer.add(self.outbox.append(message))
        except (OutboxFull, OverBudget) as error:
            self._overflowed(error)
            return
        self._send(message)

    def _overflowed(self, error: BatonError) -> None:
        """End the session, because it holds too many unacknowledged bytes."""
        log.warning("session_overflowed", gateway_id=self.gateway_id, session_id=self.session_id, problem=str(error))
        self._on_overflow(self)

    def _send(self, message: WorkerMessage) -> None:
        """Send on the stream, if there is one. Messages that a broken stream loses stay in the outbox.

        The receiver of the stream notices the break.
        """
        if self.stream is None:
            return
        try:
            self.stream.send(message)
        except StreamBroken:
            self.stream = None


class Sessions:
    """All gateway sessions of one worker."""

    def __init__(
        self,
        worker: WorkerRef,
        layout: KvLayout,
        jobs: SessionJobs,
        tasks: BackgroundTasks,
        *,
        grace_s: float,
        buffer_bytes: int,
        buffers: SharedAccount,
    ) -> None:
        """Create the sessions of a worker.

        grace_s: time that a session outlives its stream.
        buffer_bytes: largest size of the unacknowledged messages of one session.
        buffers: account of the unacknowledged messages of all sessions.
        """
        self._worker = worker
        self._layout = layout
        self._jobs = jobs
        self._tasks = tasks
        self._grace_s = grace_s
        self._buffer_bytes = buffer_bytes
        self._buffers = buffers
        self._sessions: dict[str, GatewaySession] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def are_settled(self) -> bool:
        """True if every connected gateway has acknowledged the last messages of its jobs."""
        return all(session.is_settled for session in self._sessions.values() if session.stream is not None)

    async def serve(self, stream: GatewayStream) -> None:
        """Serve one stream until it breaks or another stream takes its session over.

        Raises Refused if the first message is not a hello or if a second hello arrives.
        """
        session = None
        try:
            async with asyncio.timeout(HELLO_LIMIT_S):
                hello = await stream.receive()
            session = self._open(hello, stream)
            if session is not None:
                await self._receive(session, stream)
        except (StreamBroken, TimeoutError):
            pass
        finally:
            if session is not None:
                self._detach(session, stream)
            await stream.aclose()

    def heartbeat(self, *, steps_done: int, step_age_s: float, draining: bool) -> None:
        """Send a heartbeat on every session."""
        for session in tuple(self._sessions.values()):
            session.heartbeat(steps_done=steps_done, step_age_s=step_age_s, draining=draining)

    def close(self) -> None:
        """End all sessions, drop their jobs, and refuse new sessions. Gateways see their streams end."""
        self._is_closed = True
        for session in tuple(self._sessions.values()):
            session.flush()
            self._end(session)

    def _open(self, hello: ReceivedGatewayMessage, stream: GatewayStream) -> GatewaySession | None:
        """Resume or create the session of this stream.

        Returns None if the hello was refused, for example for another worker epoch or protocol version; the
        reply says so. Raises Refused if the first message is not a hello.
        """
        if not isinstance(hello, SessionHello):
            log.warning("session_refused", problem=f"first message is {type(hello).__name__}")
            raise invalid(f"the first message is {type(hello).__name__}; it must be a hello")
        problem = self._problem(hello)
        session = None if problem else self._sessions.get(hello.session_id)
        resumed = (
            session is not None and session.gateway_id == hello.gateway_id and session.outbox.can_resume(hello.last_seq)
        )
        if problem:
            log.warning("session_refused", gateway_id=hello.gateway_id, problem=problem)
            if not self._is_closed:
                stream.send(self._reply(resumed=False, oldest_seq=1))
            return None
        if session is not None and not resumed:
            log.warning(
                "session_resume_failed",
                gateway_id=hello.gateway_id,
                last_seq=hello.last_seq,
                oldest_seq=session.outbox.oldest_seq,
            )
            self._end(session)
        if session is None or not resumed:
            session = GatewaySession(
                hello.session_id,
                hello.gateway_id,
                buffer_bytes=self._buffer_bytes,
                buffers=self._buffers,
                on_overflow=self._end,
            )
            self._sessions[hello.session_id] = session
        if session.stream is not None:  # the gateway replaced a stream whose break was not noticed here
            self._tasks.start(session.stream.aclose(), name="close-old-session-stream")
        # Messages up to `last_seq` are processed, which is the same as acknowledged.
        self._jobs.forget(session.acknowledge(hello.last_seq) if resumed else [], session)
        session.attach(stream, self._reply(resumed=resumed, oldest_seq=session.outbox.oldest_seq), hello.last_seq)
        log.info("session_opened", gateway_id=hello.gateway_id, session_id=hello.session_id, resumed=resumed)
        return session

    def _problem(self, hello: SessionHello) -> str:
        """Return why the hello is refused, or an empty string."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"protocol_version is {hello.protocol_version}; this worker supports {PROTOCOL_VERSION}"
        if not hello.expected.is_same_incarnation(self._worker):
            return f"the hello is for {hello.expected}; this worker is {self._worker}"
        if self._is_closed:
            return "this worker is shutting down and takes no sessions"
        if hello.session_id not in self._sessions and len(self._sessions) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are open, which is the limit"
        return ""

    def _reply(self, *, resumed: bool, oldest_seq: int) -> SessionHelloReply:
        return SessionHelloReply(worker=self._worker, layout=self._layout, resumed=resumed, oldest_seq=oldest_seq)

    async def _receive(self, session: GatewaySession, stream: GatewayStream) -> None:
        while session.stream is stream:
            message = await stream.receive()
            if session.stream is not stream:
                return
            match message:
                case PrefillJob() | DecodeJob():
                    self._jobs.start(message, session)
                case RefusedJob():
                    log.warning("job_refused", job=str(message.job), problem=message.failure.message)
                    session.put_failure(message.job, message.failure)
                case Cancel():
                    self._jobs.cancel(message, session)
                case Ack():
                    self._jobs.forget(session.acknowledge(message.seq), session)
                case Ping():
                    pass  # the keepalive of the connection detects a gateway that is gone
                case SessionHello():
                    log.warning("second_hello_received", gateway_id=session.gateway_id)
                    raise invalid("a second hello was received; a stream has exactly one")

    def _detach(self, session: GatewaySession, stream: GatewayStream) -> None:
        """Start the grace period of the session, unless it has ended or another stream has taken it over."""
        if (
            session.has_ended
            or (session.stream is not None and session.stream is not stream)
            or session.grace is not None
        ):
            return
        session.stream = None
        log.info("session_broken", gateway_id=session.gateway_id, session_id=session.session_id, grace_s=self._grace_s)
        session.grace = asyncio.get_running_loop().call_later(self._grace_s, self._end, session)

    def _end(self, session: GatewaySession) -> None:
        """Remove the session, close its stream and cancel its jobs."""
        if session.has_ended:
            return
        stream = session.stream
        session.end()
        if self._sessions.get(session.session_id) is session:
            del self._sessions[session.session_id]
        if stream is not None:
            self._tasks.start(stream.aclose(), name="close-session-stream")
        self._jobs.drop_session(session)
        log.info("session_ended", gateway_id=session.gateway_id, session_id=session.session_id)
