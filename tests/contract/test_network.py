"""The contract of `Network`, for every implementation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.placement import Placement, Rejection, StillWaiting
from baton.core.cluster.worker_command import CommandKind, WorkerCommand
from baton.core.errors import Reason, Refused, StoreUnavailable, StreamBroken
from baton.core.ids import DecisionId
from baton.core.interfaces import Duplex
from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import Ack, DecodeJob, Heartbeat, PrefillJob, PrefixSource, Step
from baton.core.messages.peer_messages import Renew, Renewed
from baton.core.request import RequestActuals
from baton.runtime.network.mailbox import Mailbox
from tests import builders
from tests.contract.networks import WORLDS, StubScheduler, StubWorker, World, echo, eventually, until_broken, world_of
from tests.unit.worker.job_builders import decode_job

pytestmark = pytest.mark.contract


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with world_of(request.param) as world:
        yield world


def step(seq: int) -> Step:
    return Step(seq=seq, deltas=(builders.token_delta(seq),))


async def count_acks(stream: Duplex[Any, Any]) -> None:
    """Answer Ack(n) with step n."""
    await echo(stream, lambda ack: step(ack.seq))


# Sessions and peer streams


async def test_messages_arrive_in_order_in_both_directions(world: World) -> None:
    session = await world.network.open_session(await world.add_worker(StubWorker(session=count_acks)))
    for batch in range(0, 40, 4):
        for seq in range(batch, batch + 4):
            session.send(Ack(seq=seq))
        assert [await session.receive() for _ in range(4)] == [step(seq) for seq in range(batch, batch + 4)]
    await session.aclose()


async def test_a_worker_may_speak_first_and_at_any_time(world: World) -> None:
    async def beat(stream: Duplex[Any, Any]) -> None:
        for seq in range(1, 5):
            stream.send(Heartbeat(seq=seq, steps_done=seq, step_age_s=0.0, draining=False))
            await asyncio.sleep(0)
        await until_broken(stream)

    session = await world.network.open_session(await world.add_worker(StubWorker(session=beat)))
    received = [await session.receive() for _ in range(4)]
    assert [message.steps_done for message in received if isinstance(message, Heartbeat)] == [1, 2, 3, 4]
    await session.aclose()


async def test_a_worker_serves_sessions_and_peers_at_one_address(world: World) -> None:
    worker = StubWorker(
        session=count_acks, peer=lambda stream: echo(stream, lambda renew: Renewed(renewal=renew.renewal))
    )
    address = await world.add_worker(worker)
    session, peer = await world.network.open_session(address), await world.network.open_peer(address)
    session.send(Ack(seq=3))
    peer.send(Renew(renewal=7))
    assert await session.receive() == step(3)
    assert await peer.receive() == Renewed(renewal=7)
    await session.aclose()
    peer.send(Renew(renewal=8))
    assert await peer.receive() == Renewed(renewal=8)
    await peer.aclose()


async def test_many_streams_at_once_do_not_mix(world: World) -> None:
    address = await world.add_worker(StubWorker(session=count_acks))

    async def talk(client: int) -> list[Any]:
        session = await world.network.open_session(address)
        answers = []
        for i in range(10):
            session.send(Ack(seq=100 * client + i))
            answers.append(await session.receive())
        await session.aclose()
        return answers

    answers = await asyncio.gather(*(talk(client) for client in range(8)))
    assert answers == [[step(100 * client + i) for i in range(10)] for client in range(8)]


async def test_a_million_tokens_fit_into_one_job(world: World) -> None:
    received: list[Any] = []

    async def keep(stream: Duplex[Any, Any]) -> None:
        received.append(await stream.receive())
        stream.send(step(1))
        await until_broken(stream)

    session = await world.network.open_session(await world.add_worker(StubWorker(session=keep)))
    job = builders.prefill_job(token_ids(range(1_000_000)))
    session.send(job)
    assert await session.receive() == step(1)
    assert received == [job]
    await session.aclose()


async def test_a_job_says_where_its_kv_and_its_prefix_come_from(world: World) -> None:
    received: list[Any] = []

    async def keep(stream: Duplex[Any, Any]) -> None:
        received.extend(await until_broken(stream))

    worker = StubWorker(session=keep)
    session = await world.network.open_session(await world.add_worker(worker))
    peer, source = builders.worker_ref("p0"), PrefixSource(worker=builders.worker_ref("h0"), num_blocks=3)
    jobs: list[PrefillJob | DecodeJob] = []
    for prefix_source in (None, source):
        jobs += [builders.prefill_job(reader=reader, prefix_source=prefix_source) for reader in (None, peer)]
        jobs += [decode_job(owner=owner, prefix_source=prefix_source) for owner in (None, peer)]
    for job in jobs:
        session.send(job)
    await session.aclose()
    await eventually(lambda: worker.ended == 1)
    assert received == jobs


# How a stream ends


async def test_what_was_sent_before_closing_arrives_and_then_the_stream_is_broken(world: World) -> None:
    heard: list[Any] = []

    async def hear(stream: Duplex[Any, Any]) -> None:
        heard.extend(await until_broken(stream))

    worker = StubWorker(session=hear)
    session = await world.network.open_session(await world.add_worker(worker))
    for seq in range(5):
        session.send(Ack(seq=seq))
    await session.aclose()
    await eventually(lambda: worker.ended == 1)
    assert heard == [Ack(seq=seq) for seq in range(5)]


async def test_a_worker_that_returns_ends_the_stream_after_its_last_word(world: World) -> None:
    async def speak_and_leave(stream: Duplex[Any, Any]) -> None:
        for seq in range(1, 6):
            stream.send(step(seq))

    session = await world.network.open_session(await world.add_worker(StubWorker(session=speak_and_leave)))
    assert await until_broken(session) == [step(seq) for seq in range(1, 6)]
    await eventually(lambda: _is_broken(session))
    await session.aclose()


async def test_closed_end_cannot_send_or_receive(world: World) -> None:
    session = await world.network.open_session(await world.add_worker(StubWorker(session=count_acks)))
    session.send(Ack(seq=1))
    await session.aclose()
    await session.aclose()
    with pytest.raises(StreamBroken):
        session.send(Ack(seq=2))
    with pytest.raises(StreamBroken):
        await session.receive()


async def test_a_receiver_that_waits_is_woken_by_the_end(world: World) -> None:
    worker = StubWorker(session=until_broken)  # type: ignore[arg-type]
    address = await world.add_worker(worker)
    session = await world.network.open_session(address)
    waiting = asyncio.create_task(session.receive())
    await asyncio.sleep(0.01)
    await world.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(waiting, 2)
    await eventually(lambda: worker.ended == 1)
    await session.aclose()


async def test_a_dead_process_breaks_its_streams_and_refuses_new_ones(world: World) -> None:
    address = await world.add_worker(StubWorker(session=count_acks))
    session = await world.network.open_session(address)
    await world.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(session.receive(), 2)
    await eventually(lambda: _is_broken(session))
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(world.network.open_session(address), 4)
    await session.aclose()


async def test_a_wait_that_is_cancelled_loses_no_message(world: World) -> None:
    session = await world.network.open_session(await world.add_worker(StubWorker(session=count_acks)))
    for seq in range(20):
        waiting = asyncio.create_task(session.receive())
        await asyncio.sleep(0)
        session.send(Ack(seq=seq))
        for _ in range(seq % 5):
            await asyncio.sleep(0)
        waiting.cancel()
        received = (await asyncio.gather(waiting, return_exceptions=True))[0]
        assert (received if isinstance(received, Step) else await session.receive()) == step(seq)
    await session.aclose()


async def test_a_buffer_that_is_full_ends_the_stream_at_both_ends(world: World) -> None:
    hear_again = asyncio.Event()
    worker = StubWorker(session=lambda _: hear_again.wait())  # type: ignore[arg-type, return-value]
    address = await world.add_worker(worker)
    session = await world.network.open_session(address)
    big = builders.prefill_job(token_ids(range(100_000)))

    async def flood() -> None:
        for _ in range(1000):
            session.send(big)
            await asyncio.sleep(0)

    with pytest.raises(StreamBroken, match="buffer is full"):
        await flood()
    with pytest.raises(StreamBroken):
        session.send(Ack(seq=1))
    with pytest.raises(StreamBroken):
        await session.receive()
    hear_again.set()
    await session.aclose()
    await eventually(lambda: worker.ended == 1)


async def test_a_gateway_that_does_not_listen_is_cut_off(world: World) -> None:
    refused = asyncio.Event()

    async def flood(stream: Duplex[Any, Any]) -> None:
        deltas = tuple(builders.token_delta(*range(1000)) for _ in range(100))
        try:
            for seq in range(1000):
                stream.send(Step(seq=seq, deltas=deltas))
                await asyncio.sleep(0.001)
        except StreamBroken:
            refused.set()

    session = await world.network.open_session(await world.add_worker(StubWorker(session=flood)))
    await asyncio.wait_for(refused.wait(), 10)
    arrived = await until_broken(session)
    assert [message.seq for message in arrived if isinstance(message, Step)] == list(range(len(arrived)))
    await session.aclose()


async def test_a_refusal_reaches_the_caller_with_its_failure(world: World) -> None:
    failure = builders.failure(Reason.WRONG_EPOCH, message="w0 is another life now", blamed=builders.worker_ref())

    async def refuse(stream: Duplex[Any, Any]) -> None:
        await stream.receive()
        raise Refused(failure)

    session = await world.network.open_session(await world.add_worker(StubWorker(session=refuse)))
    session.send(Ack(seq=1))
    with pytest.raises(StreamBroken) as broken:
        await session.receive()
    assert broken.value.failure == failure
    await session.aclose()


async def test_a_service_that_crashes_ends_the_stream_only(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def crash(stream: Duplex[Any, Any]) -> None:
        raise ZeroDivisionError

    address = await world.add_worker(
        StubWorker(session=crash, peer=lambda s: echo(s, lambda renew: Renewed(renewal=renew.renewal)))
    )
    with pytest.raises(StreamBroken):  # by what opens it, if the crash was quicker than the word that it is open
        async with aclosing(await world.network.open_session(address)) as session:
            await session.receive()
    assert "ZeroDivisionError" in caplog.text
    peer = await world.network.open_peer(address)
    peer.send(Renew(renewal=1))
    assert await peer.receive() == Renewed(renewal=1)
    await peer.aclose()


async def test_a_closed_network_opens_nothing(world: World) -> None:
    address = await world.add_worker(StubWorker(session=count_acks))
    session = await world.network.open_session(address)
    await world.network.aclose()
    with pytest.raises(StreamBroken):
        await session.receive()
    with pytest.raises(StreamBroken):
        await world.network.open_session(address)


# Schedulers

PLACEMENT = Placement(
    decision_id=DecisionId("d1"),
    scheduler_id="s1",
    policy="round_robin",
    prefill=builders.worker_ref("p0"),
    decode=builders.worker_ref("d0"),
    ttft_s=0.25,
    waiting_s=0.5,
)
REJECTION = Rejection(reason=Reason.NO_WORKERS, message="no prefill worker", retry_after_s=1.5, term="workers")


@pytest.mark.parametrize("answer", [PLACEMENT, REJECTION, StillWaiting(num_waiting=7)])
async def test_place_returns_what_the_scheduler_decided(
    world: World, answer: Placement | Rejection | StillWaiting
) -> None:
    service = StubScheduler(answer)
    scheduler = world.network.scheduler(await world.add_scheduler(service))
    asking = builders.query(waited_s=0.25, answer_within_s=1.5)
    assert await scheduler.place(asking) == answer
    assert service.asked == [asking]


async def test_the_other_calls_of_a_scheduler(world: World) -> None:
    service = StubScheduler()
    scheduler = world.network.scheduler(await world.add_scheduler(service))
    actuals = [RequestActuals(decision_id=DecisionId(f"d{n}"), outcome="finished", ttft_s=0.5) for n in range(3)]
    await scheduler.finished(*actuals)
    service.answer = ()
    assert await scheduler.explain(None) == ()
    assert await scheduler.explain(b"r") == ()
    service.answer = True
    assert await scheduler.drain("w0")
    assert await scheduler.drain("w0", node_shutting_down=True)
    assert service.asked == [*actuals, None, b"r", ("w0", False), ("w0", True)]


async def test_a_schedulers_errors_are_typed(world: World) -> None:
    failure = builders.failure(Reason.DRAINING, retry_after_s=2.0, retriable=True)
    service = StubScheduler(Refused(failure))
    address = await world.add_scheduler(service)
    scheduler = world.network.scheduler(address)
    with pytest.raises(Refused) as refused:
        await scheduler.place(builders.query())
    assert refused.value.failure == failure
    await world.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(scheduler.place(builders.query()), 2)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(scheduler.watch(), 2)


async def test_scheduler_crash_breaks_its_open_call(world: World) -> None:
    asked = asyncio.Event()

    class Slow(StubScheduler):
        async def place(self, query: Any) -> Placement | Rejection:
            asked.set()
            await asyncio.Event().wait()
            return PLACEMENT

    address = await world.add_scheduler(Slow())
    asking = asyncio.create_task(world.network.scheduler(address).place(builders.query()))
    await asked.wait()
    await world.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(asking, 2)


async def test_cancelled_call_is_cancelled_at_the_scheduler(world: World) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    class Slow(StubScheduler):
        async def place(self, query: Any) -> Placement | Rejection:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return PLACEMENT

    asking = asyncio.create_task(world.network.scheduler(await world.add_scheduler(Slow())).place(builders.query()))
    await asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(ended.wait(), 2)


async def test_a_watch_delivers_every_update_until_either_side_ends_it(world: World) -> None:
    def update(i: int) -> ClusterUpdate:
        return ClusterUpdate(scheduler_id="s1", reports=(builders.worker_report(report_seq=i),))

    updates = Updates()
    address = await world.add_scheduler(StubScheduler(updates=updates))
    watch = await world.network.scheduler(address).watch()
    for i in range(30):
        updates.put(update(i))
        assert await watch.receive() == update(i)
    await watch.aclose()
    await eventually(lambda: updates.is_closed)
    with pytest.raises(StreamBroken):
        await watch.receive()

    again = Updates()
    address = await world.add_scheduler(StubScheduler(updates=again))
    watch = await world.network.scheduler(address).watch()
    again.put(update(1))
    assert await watch.receive() == update(1)
    await world.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(watch.receive(), 2)
    await eventually(lambda: again.is_closed)
    await watch.aclose()


async def test_reports_go_up_and_commands_come_down(world: World) -> None:
    command = WorkerCommand(kind=CommandKind.CONNECT, peer=builders.worker_ref("d0"))
    reports = []

    async def answer_reports(stream: Duplex[Any, Any]) -> None:
        while True:
            reports.append(await stream.receive())
            stream.send(command)

    stream = await world.network.open_report(await world.add_scheduler(StubScheduler(report=answer_reports)))
    for seq in range(3):
        stream.send(builders.worker_report(report_seq=seq))
        assert await stream.receive() == command
    assert reports == [builders.worker_report(report_seq=seq) for seq in range(3)]
    await stream.aclose()


async def test_a_store_error_reaches_the_caller(world: World) -> None:
    scheduler = world.network.scheduler(await world.add_scheduler(StubScheduler(StoreUnavailable("Redis is away"))))
    with pytest.raises((StoreUnavailable, Refused), match="Redis is away"):
        await scheduler.explain(None)


class Updates:
    """A source that a test fills."""

    def __init__(self) -> None:
        self._mailbox: Mailbox[ClusterUpdate] = Mailbox(100)

    @property
    def is_closed(self) -> bool:
        return self._mailbox.has_ended

    def put(self, update: ClusterUpdate) -> None:
        self._mailbox.put(update)

    async def receive(self) -> ClusterUpdate:
        return await self._mailbox.get()

    async def aclose(self) -> None:
        self._mailbox.close("closed")


def _is_broken(stream: Duplex[Any, Any]) -> bool:
    try:
        stream.send(Ack(seq=1))
    except StreamBroken:
        return True
    return False
