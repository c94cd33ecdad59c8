"""Standing sessions with gateways: who is on the other end, what it has not acknowledged yet, and what
happens when the stream breaks.

A session outlives its stream by `session_grace_s`. A gateway that returns in time goes on after its
`last_seq`; one that does not, or that leaves too much unacknowledged, loses the session, and the session's
jobs are cancelled.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from baton.core.errors import Failure, StreamBroken, invalid
from baton.core.ids import JobId, WorkerRef
from baton.core.interfaces import Duplex
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.jobs import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    DecodeJob,
    GatewayMessage,
    Heartbeat,
    JobFailure,
    Ping,
    PrefillJob,
    SessionHello,
    SessionHelloReply,
    Step,
    WorkerMessage,
)
from baton.core.request import TokenDelta
from baton.runtime.logging import get_logger
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.sessions.outbox import Outbox, OutboxFull

log = get_logger(__name__)

GatewayStream = Duplex[WorkerMessage, GatewayMessage]

MAX_SESSIONS = 256
"""Sessions of one worker, broken ones in their grace included; a cluster has a few gateways."""
HELLO_LIMIT_S = 10.0
"""Time for a new stream to say who it is."""


class SessionJobs(Protocol):
    """What sessions ask of the worker's jobs."""

    def start(self, job: PrefillJob | DecodeJob, session: "GatewaySession") -> None: ...

    def cancel(self, cancel: Cancel, session: "GatewaySession") -> None: ...

    def forget(self, jobs: Iterable[JobId], session: "GatewaySession") -> None:
        """The last messages of these jobs have arrived."""
        ...

    def drop_session(self, session: "GatewaySession") -> None:
        """The session is over: its jobs end, and nobody hears of them."""
        ...


class GatewaySession:
    """One gateway's session. What is put in one go of the event loop, such as all outputs of an engine step,
    leaves as one `Step`; after the engine has launched its next step, so that messages are written while the
    device computes."""

    def __init__(
        self, session_id: str, gateway_id: str, *, buffer_bytes: int, on_overflow: Callable[["GatewaySession"], None]
    ) -> None:
        self.session_id = session_id
        self.gateway_id = gateway_id
        self.stream: GatewayStream | None = None
        self.grace: asyncio.TimerHandle | None = None
        self.has_ended = False
        self.outbox = Outbox(buffer_bytes)
        self._on_overflow = on_overflow
        self._deltas: list[TokenDelta] = []
        self._failures: list[JobFailure] = []
        self._last_of: list[JobId] = []  # jobs whose last message is in the next Step
        self._unacknowledged: list[tuple[int, JobId]] = []  # (seq of its last message, job), by seq
        self._flush: asyncio.Handle | None = None

    def put_delta(self, delta: TokenDelta, *, is_last: bool) -> None:
        """Queue new tokens; `is_last`: the job ends with them."""
        self._deltas.append(delta)
        if is_last:
            self._last_of.append(delta.job)
        self._schedule()

    def put_failure(self, job: JobId, failure: Failure) -> None:
        """Queue the job's last message."""
        self._failures.append(JobFailure(job=job, failure=failure))
        self._last_of.append(job)
        self._schedule()

    def flush(self) -> None:
        """Send what was put since the last time, as one message."""
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
        """Tell the gateway that this worker lives, and whether it steps. Nothing while the stream is
        broken."""
        if self.stream is not None:
            self._append(
                Heartbeat(seq=self.outbox.next_seq, steps_done=steps_done, step_age_s=step_age_s, draining=draining)
            )

    def acknowledge(self, seq: int) -> list[JobId]:
        """The gateway has processed all messages up to `seq`. Returns the jobs whose last message is now
        acknowledged."""
        self.outbox.acknowledge(seq)
        done = [job for last_seq, job in self._unacknowledged if last_seq <= seq]
        self._unacknowledged = self._unacknowledged[len(done) :]
        return done

    def attach(self, stream: GatewayStream, reply: SessionHelloReply, last_seq: int) -> None:
        """Go on over `stream`: first the reply, then everything after `last_seq`."""
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None
        self.stream = stream
        self._send(reply)
        for message in self.outbox.after(last_seq):
            self._send(message)

    def end(self) -> None:
        """Nothing is sent or kept any more."""
        self.has_ended = True
        self.stream = None
        for handle in (self.grace, self._flush):
            if handle is not None:
                handle.cancel()
        self.grace = self._flush = None
        self._deltas, self._failures, self._last_of, self._unacknowledged = [], [], [], []

    @property
    def is_settled(self) -> bool:
        """Whether the gateway has everything that was said to it."""
        return not (self._deltas or self._failures or self._unacknowledged)

    def _schedule(self) -> None:
        if self._flush is None and not self.has_ended:
            self._flush = asyncio.get_running_loop().call_soon(self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._flush = None
        self.flush()

    def _append(self, message: Step | Heartbeat) -> None:
        try:
            self.outbox.append(message)
        except OutboxFull as error:
            log.warning("session_overflow", gateway_id=self.gateway_id, session_id=self.session_id, problem=str(error))
            self._on_overflow(self)
            return
        self._send(message)

    def _send(self, message: WorkerMessage) -> None:
        """To the stream, if there is one. What a broken stream loses stays in the outbox; who receives on the
        stream sees it break."""
        if self.stream is None:
            return
        try:
            self.stream.send(message)
        except StreamBroken:
            self.stream = None


class Sessions:
    """All sessions of one worker."""

    def __init__(
        self,
        worker: WorkerRef,
        layout: KvLayout,
        jobs: SessionJobs,
        tasks: BackgroundTasks,
        *,
        grace_s: float,
        buffer_bytes: int,
    ) -> None:
        self._worker = worker
        self._layout = layout
        self._jobs = jobs
        self._tasks = tasks
        self._grace_s = grace_s
        self._buffer_bytes = buffer_bytes
        self._sessions: dict[str, GatewaySession] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def are_settled(self) -> bool:
        """Whether every gateway that is connected has acknowledged its jobs' last messages."""
        return all(session.is_settled for session in self._sessions.values() if session.stream is not None)

    async def serve(self, stream: GatewayStream) -> None:
        """Serve one stream until it breaks or another takes its session over. Raises Refused for one without
        a hello, or with two."""
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
        for session in tuple(self._sessions.values()):
            session.heartbeat(steps_done=steps_done, step_age_s=step_age_s, draining=draining)

    def close(self) -> None:
        """End all sessions and take no other: this worker is unhealthy, or leaves. Jobs are dropped; gateways
        see their streams end."""
        self._is_closed = True
        for session in tuple(self._sessions.values()):
            session.flush()
            self._end(session)

    def _open(self, hello: GatewayMessage, stream: GatewayStream) -> GatewaySession | None:
        """The session that this stream goes on with; None when it was refused, which the reply tells: another
        life, another protocol. Raises Refused where nothing says whose session it would be."""
        if not isinstance(hello, SessionHello):
            log.warning("session_refused", problem=f"began with {type(hello).__name__}, not with a hello")
            raise invalid(f"a session begins with a hello, not with {type(hello).__name__}")
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
                "session_not_resumable",
                gateway_id=hello.gateway_id,
                last_seq=hello.last_seq,
                oldest_seq=session.outbox.oldest_seq,
            )
            self._end(session)
        if session is None or not resumed:
            session = GatewaySession(
                hello.session_id, hello.gateway_id, buffer_bytes=self._buffer_bytes, on_overflow=self._end
            )
            self._sessions[hello.session_id] = session
        if session.stream is not None:  # the gateway gave up a stream that still looks alive here
            self._tasks.start(session.stream.aclose(), name="close-old-session-stream")
        # What the gateway says it has processed is as good as acknowledged.
        self._jobs.forget(session.acknowledge(hello.last_seq) if resumed else [], session)
        session.attach(stream, self._reply(resumed=resumed, oldest_seq=session.outbox.oldest_seq), hello.last_seq)
        log.info("session_open", gateway_id=hello.gateway_id, session_id=hello.session_id, resumed=resumed)
        return session

    def _problem(self, hello: SessionHello) -> str:
        """Why this hello is refused; empty when it is not."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"speaks protocol version {hello.protocol_version}, this worker {PROTOCOL_VERSION}"
        if not hello.expected.is_same_incarnation(self._worker):
            return f"means {hello.expected}, this is {self._worker}"
        if self._is_closed:
            return "this worker takes no sessions any more"
        if hello.session_id not in self._sessions and len(self._sessions) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are open"
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
                case Cancel():
                    self._jobs.cancel(message, session)
                case Ack():
                    self._jobs.forget(session.acknowledge(message.seq), session)
                case Ping():
                    pass  # a gateway that is gone breaks its stream, by the connection's own keepalive
                case SessionHello():
                    log.warning("session_hello_repeated", gateway_id=session.gateway_id)
                    raise invalid("a session has one hello")

    def _detach(self, session: GatewaySession, stream: GatewayStream) -> None:
        """The stream is gone. Unless another has taken the session over, its grace begins."""
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
        """The session is over: forget it, cancel its jobs, close its stream."""
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
