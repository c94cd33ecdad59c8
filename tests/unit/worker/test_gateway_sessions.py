"""Tests of gateway sessions: batching of messages, resume, grace period, overflow and refusals."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from baton.core.errors import Code, Failure, Reason, Refused, StreamBroken
from baton.core.ids import JobId
from baton.core.messages.jobs import (
    Ack,
    Cancel,
    DecodeJob,
    Heartbeat,
    JobFailure,
    Ping,
    PrefillJob,
    RefusedJob,
    SessionHello,
    SessionHelloReply,
    Step,
)
from baton.core.request import FinishReason, TokenDelta
from baton.runtime.network.in_process_network import InProcessDuplex, duplex_pair
from baton.runtime.process.byte_budget import Account, ByteBudget
from baton.runtime.process.shared_account import SharedAccount
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.sessions.gateway_sessions import MAX_SESSIONS, GatewaySession, Sessions
from tests import builders
from tests.unit.worker.job_builders import prefill_job
from tests.unit.worker.virtual_loop import virtual

WORKER = builders.worker_ref("w0", 7)
GRACE_S = 2.0


@dataclass
class FakeJobs:
    """A job table that records its calls."""

    started: list[PrefillJob | DecodeJob] = field(default_factory=list)
    cancelled: list[Cancel] = field(default_factory=list)
    forgotten: list[JobId] = field(default_factory=list)
    dropped: list[GatewaySession] = field(default_factory=list)
    session: GatewaySession | None = None

    def start(self, job: PrefillJob | DecodeJob, session: GatewaySession) -> None:
        self.started.append(job)
        self.session = session

    def cancel(self, cancel: Cancel, session: GatewaySession) -> None:
        self.cancelled.append(cancel)

    def forget(self, jobs: Iterable[JobId], session: GatewaySession) -> None:
        self.forgotten += jobs

    def drop_session(self, session: GatewaySession) -> None:
        self.dropped.append(session)


class Rig:
    """Sessions over recorded jobs, and the streams into them."""

    def __init__(self, buffer_bytes: int = 100_000, total_bytes: int = 1_000_000) -> None:
        self.budget = ByteBudget({Account.SESSIONS: total_bytes})
        self.jobs = FakeJobs()
        self.errors: list[BaseException] = []
        self.tasks = BackgroundTasks(self.errors.append)
        self.sessions = Sessions(
            WORKER,
            builders.layout(),
            self.jobs,
            self.tasks,
            grace_s=GRACE_S,
            buffer_bytes=buffer_bytes,
            buffers=SharedAccount(self.budget, Account.SESSIONS, "unacknowledged output"),
        )
        self.serving: list[asyncio.Task[None]] = []

    def dial(self) -> InProcessDuplex[Any, Any]:
        ours, theirs = duplex_pair()
        self.serving.append(asyncio.create_task(self.sessions.serve(theirs)))
        return ours

    async def open(self, last_seq: int = 0, **changes: Any) -> tuple[InProcessDuplex[Any, Any], SessionHelloReply]:
        stream = self.dial()
        stream.send(replace(hello(), last_seq=last_seq, **changes))
        return stream, await stream.receive()

    async def open_with_job(self, attempt: int = 0) -> tuple[InProcessDuplex[Any, Any], GatewaySession]:
        stream, _ = await self.open()
        stream.send(prefill_job(attempt=attempt))
        await settle()
        assert self.jobs.session is not None
        return stream, self.jobs.session


def hello() -> SessionHello:
    return SessionHello(gateway_id="g", session_id="s", last_seq=0, expected=WORKER)


def delta(job: JobId, *token_ids: int, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(job=job, sample_index=0, output_index=0, token_ids=token_ids, finish=finish)


def failure() -> Failure:
    return Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message="no")


async def settle() -> None:
    """Run all callbacks that are ready."""
    for _ in range(20):
        await asyncio.sleep(0)


JOB = prefill_job().job


@virtual
async def test_messages_of_one_loop_iteration_are_sent_as_one() -> None:
    rig = Rig()
    stream, session = await rig.open_with_job()
    session.put_delta(delta(JOB, 1), is_last=False)
    session.put_delta(delta(JOB, 2), is_last=True)
    session.put_failure(JobId(request_id=b"other", attempt=0), failure())
    await settle()
    session.put_delta(delta(JobId(request_id=b"third", attempt=0), 3), is_last=False)
    first, second = await stream.receive(), await stream.receive()
    assert isinstance(first, Step)
    assert isinstance(second, Step)
    assert (first.seq, [d.token_ids for d in first.deltas], len(first.failures)) == (1, [(1,), (2,)], 1)
    assert (second.seq, [d.token_ids for d in second.deltas]) == (2, [(3,)])


@virtual
async def test_refused_job_fails_alone() -> None:
    rig = Rig()
    stream, _ = await rig.open()
    stream.send(RefusedJob(job=JOB, failure=failure()))
    stream.send(prefill_job(attempt=1))
    step = await stream.receive()
    assert isinstance(step, Step)
    assert step.failures == (JobFailure(job=JOB, failure=failure()),)
    assert [job.job.attempt for job in rig.jobs.started] == [1]


@virtual
async def test_heartbeats_and_steps_share_one_numbering() -> None:
    rig = Rig()
    stream, session = await rig.open_with_job()
    session.put_delta(delta(JOB, 1), is_last=False)
    await settle()
    rig.sessions.heartbeat(steps_done=5, step_age_s=0.25, draining=True)
    assert (await stream.receive()).seq == 1
    assert await stream.receive() == Heartbeat(seq=2, steps_done=5, step_age_s=0.25, draining=True)


@virtual
async def test_job_is_dropped_when_its_last_message_is_acknowledged() -> None:
    rig = Rig()
    stream, session = await rig.open_with_job()
    session.put_delta(delta(JOB, 1), is_last=False)
    await settle()
    session.put_delta(delta(JOB, 2), is_last=True)
    await settle()
    stream.send(Ack(seq=1))
    await settle()
    assert rig.jobs.forgotten == []
    assert not session.is_settled
    stream.send(Ack(seq=2))
    await settle()
    assert rig.jobs.forgotten == [JOB]
    assert session.is_settled


@virtual
async def test_reconnected_gateway_continues_after_its_last_seq() -> None:
    rig = Rig()
    stream, session = await rig.open_with_job()
    for token in range(3):
        session.put_delta(delta(JOB, token), is_last=token == 2)
        await settle()
    await stream.aclose()
    await settle()
    session.put_failure(JobId(request_id=b"while away", attempt=0), failure())
    await settle()
    stream, reply = await rig.open(last_seq=2)
    assert (reply.resumed, reply.worker) == (True, WORKER)
    missed = [await stream.receive(), await stream.receive()]
    assert [m.seq for m in missed] == [3, 4]
    assert missed[0].deltas[0].token_ids == (2,)
    await asyncio.sleep(2 * GRACE_S)
    assert rig.jobs.dropped == []


@virtual
async def test_last_seq_of_a_hello_acknowledges_messages() -> None:
    rig = Rig()
    stream, session = await rig.open_with_job()
    session.put_delta(delta(JOB, 1), is_last=True)
    await settle()
    await stream.aclose()
    await rig.open(last_seq=1)
    assert rig.jobs.forgotten == [JOB]
    assert len(session.outbox) == 0


@virtual
async def test_broken_session_ends_after_its_grace_period() -> None:
    rig = Rig()
    stream, session = await rig.open_with_job()
    await stream.aclose()
    await asyncio.sleep(0.9 * GRACE_S)
    assert rig.jobs.dropped == []
    await asyncio.sleep(0.2 * GRACE_S)
    assert rig.jobs.dropped == [session]
    _, reply = await rig.open(last_seq=1)
    assert reply.resumed is False


@virtual
async def test_new_stream_takes_over_from_an_unbroken_one() -> None:
    rig = Rig()
    old, session = await rig.open_with_job()
    new, reply = await rig.open(last_seq=0)
    assert reply.resumed
    with pytest.raises(StreamBroken):
        await old.receive()
    session.put_delta(delta(JOB, 1), is_last=False)
    assert (await new.receive()).seq == 1
    await asyncio.sleep(2 * GRACE_S)
    assert rig.jobs.dropped == []


@virtual
async def test_messages_of_the_replaced_stream_are_ignored() -> None:
    rig = Rig()
    old, _ = await rig.open_with_job()
    old.send(Cancel(job=JOB, reason=Reason.CANCELLED))
    rig.sessions._sessions["s"].stream = None  # the worker saw the break first, the message was already on its way
    await settle()
    assert rig.jobs.cancelled == []


@virtual
async def test_session_that_cannot_resume_starts_anew() -> None:
    rig = Rig()
    stream, session = await rig.open_with_job()
    session.put_delta(delta(JOB, 1), is_last=True)
    await settle()
    stream.send(Ack(seq=1))
    await settle()
    _, reply = await rig.open(last_seq=0)
    assert reply.resumed is False
    assert rig.jobs.dropped == [session]


@virtual
async def test_session_with_too_many_unacknowledged_bytes_ends() -> None:
    rig = Rig(buffer_bytes=1_000)
    stream, session = await rig.open_with_job()
    for token in range(40):
        session.put_delta(delta(JOB, token), is_last=False)
        await settle()
    assert rig.jobs.dropped == [session]
    assert len(session.outbox) < 40
    while True:
        try:
            await stream.receive()
        except StreamBroken:
            break
    assert rig.errors == []


@pytest.mark.parametrize(
    "changes",
    [{"expected": builders.worker_ref("w0", 8)}, {"expected": builders.worker_ref("w1", 7)}, {"protocol_version": 99}],
)
def test_other_epoch_or_protocol_version_is_refused(changes: dict[str, Any]) -> None:
    @virtual
    async def refused() -> None:
        rig = Rig()
        stream, reply = await rig.open(**changes)
        assert (reply.worker, reply.resumed, reply.protocol_version) == (WORKER, False, 1)
        with pytest.raises(StreamBroken):
            await stream.receive()
        assert len(rig.sessions) == 0

    refused()


@virtual
async def test_stream_without_a_hello_is_closed() -> None:
    rig = Rig()
    stream = rig.dial()
    stream.send(Ping())
    with pytest.raises(StreamBroken):
        await stream.receive()
    with pytest.raises(Refused, match="the first message is Ping; it must be a hello"):
        await rig.serving[0]


@virtual
async def test_second_hello_ends_the_stream() -> None:
    rig = Rig()
    stream, _ = await rig.open()
    stream.send(hello())
    with pytest.raises(StreamBroken):
        await stream.receive()
    with pytest.raises(Refused, match="exactly one"):
        await rig.serving[0]


@virtual
async def test_silent_stream_is_closed() -> None:
    rig = Rig()
    stream = rig.dial()
    with pytest.raises(StreamBroken):
        await stream.receive()
    assert rig.errors == []


@virtual
async def test_sessions_are_bounded() -> None:
    rig = Rig()
    for number in range(MAX_SESSIONS):
        await rig.open(session_id=f"s{number}")
    stream, reply = await rig.open(session_id="one more")
    assert reply.resumed is False
    with pytest.raises(StreamBroken):
        await stream.receive()
    assert len(rig.sessions) == MAX_SESSIONS


@virtual
async def test_close_flushes_messages_and_refuses_new_sessions() -> None:
    rig = Rig()
    stream, session = await rig.open_with_job()
    session.put_failure(JOB, failure())
    rig.sessions.close()
    assert (await stream.receive()).failures[0].job == JOB
    with pytest.raises(StreamBroken):
        await stream.receive()
    again = rig.dial()
    again.send(hello())
    with pytest.raises(StreamBroken):
        await again.receive()
    assert rig.jobs.dropped == [session]


@virtual
async def test_session_with_most_unacknowledged_bytes_ends_when_all_sessions_have_too_many() -> None:
    """A gateway that acknowledges nothing loses its session, and one that acknowledges keeps its own."""
    rig = Rig(buffer_bytes=10_000, total_bytes=10_000)
    slow_stream, slow = await rig.open_with_job()
    stream, _ = await rig.open(gateway_id="other", session_id="other")
    stream.send(prefill_job(request=b"other"))
    await settle()
    other = rig.jobs.session
    assert other is not None
    assert other is not slow
    for number in range(12):
        slow.put_delta(delta(JOB, number), is_last=False)
        await settle()
    for number in range(60):
        other.put_delta(delta(JOB, number), is_last=False)
        await settle()
        stream.send(Ack(seq=number - 5))
        await settle()
        assert rig.budget.used(Account.SESSIONS) <= 10_000
    for number in range(40):
        if not slow.has_ended:
            slow.put_delta(delta(JOB, 12 + number), is_last=False)
            await settle()
    assert slow.has_ended
    assert not other.has_ended
    assert rig.jobs.dropped == [slow]
    assert rig.budget.used(Account.SESSIONS) == other.outbox.num_bytes
    rig.sessions.close()
    assert rig.budget.used(Account.SESSIONS) == 0
    await slow_stream.aclose()


@virtual
async def test_acknowledged_messages_give_their_bytes_back() -> None:
    rig = Rig()
    stream, session = await rig.open_with_job()
    session.put_delta(delta(JOB, 1), is_last=False)
    await settle()
    assert rig.budget.used(Account.SESSIONS) == session.outbox.num_bytes > 0
    stream.send(Ack(seq=1))
    await settle()
    assert rig.budget.used(Account.SESSIONS) == 0
