"""Contract of the worker streams of a `Network`: sessions and peer streams."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from baton.core.errors import Reason, Refused, StreamBroken
from baton.core.interfaces import Duplex
from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import Ack, DecodeJob, Heartbeat, PrefillJob, PrefixSource, Step
from baton.core.messages.peer_messages import Renew, Renewed
from baton.core.messages.prefix_messages import (
    PART_BYTES,
    ExportPrefix,
    FilePart,
    ImportedBlocks,
    ImportPrefix,
    NextPart,
    PrefixOffer,
)
from tests import builders
from tests.contract.networks import (
    NetworkHarness,
    StubWorker,
    echo,
    eventually,
    is_broken,
    until_broken,
)
from tests.times import LONG_LIMIT_S
from tests.unit.worker.job_builders import decode_job

pytestmark = pytest.mark.contract


def step(seq: int) -> Step:
    return Step(seq=seq, deltas=(builders.token_delta(seq),))


async def answer_acks(stream: Duplex[Any, Any]) -> None:
    """Answer each Ack with the step of its number."""
    await echo(stream, lambda ack: step(ack.seq))


async def test_messages_arrive_in_order_in_both_directions(harness: NetworkHarness) -> None:
    session = await harness.network.open_session(await harness.add_worker(StubWorker(session=answer_acks)))
    for batch in range(0, 40, 4):
        for seq in range(batch, batch + 4):
            session.send(Ack(seq=seq))
        assert [await session.receive() for _ in range(4)] == [step(seq) for seq in range(batch, batch + 4)]
    await session.aclose()


async def test_worker_can_send_before_the_gateway_does(harness: NetworkHarness) -> None:
    async def send_heartbeats(stream: Duplex[Any, Any]) -> None:
        for seq in range(1, 5):
            stream.send(Heartbeat(seq=seq, steps_done=seq, step_age_s=0.0, draining=False))
            await asyncio.sleep(0)
        await until_broken(stream)

    session = await harness.network.open_session(await harness.add_worker(StubWorker(session=send_heartbeats)))
    received = [await session.receive() for _ in range(4)]
    assert [message.steps_done for message in received if isinstance(message, Heartbeat)] == [1, 2, 3, 4]
    await session.aclose()


async def test_worker_serves_sessions_and_peer_streams_at_one_address(harness: NetworkHarness) -> None:
    worker = StubWorker(
        session=answer_acks, peer=lambda stream: echo(stream, lambda renew: Renewed(renewal=renew.renewal))
    )
    address = await harness.add_worker(worker)
    session, peer = await harness.network.open_session(address), await harness.network.open_peer(address)
    session.send(Ack(seq=3))
    peer.send(Renew(renewal=7))
    assert await session.receive() == step(3)
    assert await peer.receive() == Renewed(renewal=7)
    await session.aclose()
    peer.send(Renew(renewal=8))
    assert await peer.receive() == Renewed(renewal=8)
    await peer.aclose()


async def test_parts_of_files_arrive_unchanged_and_refusals_give_the_reason(harness: NetworkHarness) -> None:
    tenant_root = bytes(range(16))
    asked = ExportPrefix(hashes=(bytes(16), bytes([7]) * 16), tenant_root=tenant_root)
    sent = [asked, ImportPrefix(tenant_root=tenant_root), NextPart(), FilePart(b"\0\xff" * 1000), FilePart(b"", True)]
    answers = [
        PrefixOffer(num_blocks=2, num_bytes=2**40),
        FilePart(bytes(PART_BYTES)),
        NextPart(),
        ImportedBlocks(num_blocks=3, num_cached_before=1, num_file_blocks=9),
    ]
    received: list[Any] = []

    async def copy(stream: Duplex[Any, Any]) -> None:
        received.extend([await stream.receive() for _ in sent])
        for answer in answers:
            stream.send(answer)
        await stream.receive()
        raise Refused(builders.failure(message="the file is damaged"))

    stream = await harness.network.open_prefix_copy(await harness.add_worker(StubWorker(copy_prefix=copy)))
    for message in sent:
        stream.send(message)  # type: ignore[arg-type]
    assert [await stream.receive() for _ in answers] == answers
    assert received == sent
    stream.send(NextPart())
    with pytest.raises(StreamBroken) as broken:
        await stream.receive()
    assert broken.value.failure is not None
    assert broken.value.failure.message == "the file is damaged"
    await stream.aclose()


async def test_concurrent_streams_receive_only_their_own_messages(harness: NetworkHarness) -> None:
    address = await harness.add_worker(StubWorker(session=answer_acks))

    async def exchange(client: int) -> list[Any]:
        session = await harness.network.open_session(address)
        answers = []
        for i in range(10):
            session.send(Ack(seq=100 * client + i))
            answers.append(await session.receive())
        await session.aclose()
        return answers

    answers = await asyncio.gather(*(exchange(client) for client in range(8)))
    assert answers == [[step(100 * client + i) for i in range(10)] for client in range(8)]


async def test_job_with_a_million_tokens_is_delivered(harness: NetworkHarness) -> None:
    received: list[Any] = []

    async def record(stream: Duplex[Any, Any]) -> None:
        received.append(await stream.receive())
        stream.send(step(1))
        await until_broken(stream)

    session = await harness.network.open_session(await harness.add_worker(StubWorker(session=record)))
    job = builders.prefill_job(token_ids(range(1_000_000)))
    session.send(job)
    assert await session.receive() == step(1)
    assert received == [job]
    await session.aclose()


async def test_jobs_with_and_without_peer_and_prefix_source_arrive_unchanged(harness: NetworkHarness) -> None:
    received: list[Any] = []

    async def record(stream: Duplex[Any, Any]) -> None:
        received.extend(await until_broken(stream))

    worker = StubWorker(session=record)
    session = await harness.network.open_session(await harness.add_worker(worker))
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


# End of a stream


async def test_messages_sent_before_close_arrive_at_the_worker(harness: NetworkHarness) -> None:
    received: list[Any] = []

    async def record(stream: Duplex[Any, Any]) -> None:
        received.extend(await until_broken(stream))

    worker = StubWorker(session=record)
    session = await harness.network.open_session(await harness.add_worker(worker))
    for seq in range(5):
        session.send(Ack(seq=seq))
    await session.aclose()
    await eventually(lambda: worker.ended == 1)
    assert received == [Ack(seq=seq) for seq in range(5)]


async def test_messages_sent_before_the_worker_returns_arrive(harness: NetworkHarness) -> None:
    async def send_and_return(stream: Duplex[Any, Any]) -> None:
        for seq in range(1, 6):
            stream.send(step(seq))

    session = await harness.network.open_session(await harness.add_worker(StubWorker(session=send_and_return)))
    assert await until_broken(session) == [step(seq) for seq in range(1, 6)]
    await eventually(lambda: is_broken(session, Ack(seq=1)))
    await session.aclose()


async def test_send_and_receive_after_close_raise(harness: NetworkHarness) -> None:
    session = await harness.network.open_session(await harness.add_worker(StubWorker(session=answer_acks)))
    session.send(Ack(seq=1))
    await session.aclose()
    await session.aclose()
    with pytest.raises(StreamBroken):
        session.send(Ack(seq=2))
    with pytest.raises(StreamBroken):
        await session.receive()


async def test_removed_worker_breaks_a_waiting_receive(harness: NetworkHarness) -> None:
    worker = StubWorker(session=until_broken)  # type: ignore[arg-type]
    address = await harness.add_worker(worker)
    session = await harness.network.open_session(address)
    waiting = asyncio.create_task(session.receive())
    await asyncio.sleep(0.01)
    await harness.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(waiting, LONG_LIMIT_S)
    await eventually(lambda: worker.ended == 1)
    await session.aclose()


async def test_removed_worker_breaks_open_streams_and_refuses_new_ones(harness: NetworkHarness) -> None:
    address = await harness.add_worker(StubWorker(session=answer_acks))
    session = await harness.network.open_session(address)
    await harness.remove(address)
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(session.receive(), LONG_LIMIT_S)
    await eventually(lambda: is_broken(session, Ack(seq=1)))
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(harness.network.open_session(address), LONG_LIMIT_S)
    await session.aclose()


async def test_cancelled_receive_on_a_session_loses_no_message(harness: NetworkHarness) -> None:
    session = await harness.network.open_session(await harness.add_worker(StubWorker(session=answer_acks)))
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


async def test_worker_that_does_not_read_breaks_the_session(harness: NetworkHarness) -> None:
    can_return = asyncio.Event()
    worker = StubWorker(session=lambda _: can_return.wait())  # type: ignore[arg-type, return-value]
    address = await harness.add_worker(worker)
    session = await harness.network.open_session(address)
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
    can_return.set()
    await session.aclose()
    await eventually(lambda: worker.ended == 1)


async def test_gateway_that_does_not_read_breaks_the_session(harness: NetworkHarness) -> None:
    is_broken_at_worker = asyncio.Event()

    async def flood(stream: Duplex[Any, Any]) -> None:
        deltas = tuple(builders.token_delta(*range(1000)) for _ in range(100))
        try:
            for seq in range(1000):
                stream.send(Step(seq=seq, deltas=deltas))
                await asyncio.sleep(0.001)
        except StreamBroken:
            is_broken_at_worker.set()

    session = await harness.network.open_session(await harness.add_worker(StubWorker(session=flood)))
    await asyncio.wait_for(is_broken_at_worker.wait(), 60)
    arrived = await until_broken(session)
    assert [message.seq for message in arrived if isinstance(message, Step)] == list(range(len(arrived)))
    await session.aclose()


async def test_refusal_by_the_worker_reaches_the_gateway_with_its_failure(harness: NetworkHarness) -> None:
    failure = builders.failure(Reason.WRONG_EPOCH, message="w0 has another epoch", blamed=builders.worker_ref())

    async def refuse(stream: Duplex[Any, Any]) -> None:
        await stream.receive()
        raise Refused(failure)

    session = await harness.network.open_session(await harness.add_worker(StubWorker(session=refuse)))
    session.send(Ack(seq=1))
    with pytest.raises(StreamBroken) as broken:
        await session.receive()
    assert broken.value.failure == failure
    await session.aclose()


async def test_exception_in_a_service_breaks_only_its_stream(
    harness: NetworkHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(stream: Duplex[Any, Any]) -> None:
        raise ZeroDivisionError

    address = await harness.add_worker(
        StubWorker(session=crash, peer=lambda s: echo(s, lambda renew: Renewed(renewal=renew.renewal)))
    )
    with pytest.raises(StreamBroken):  # from `open_session` if the service crashed before it was accepted
        async with aclosing(await harness.network.open_session(address)) as session:
            await session.receive()
    assert "ZeroDivisionError" in caplog.text
    peer = await harness.network.open_peer(address)
    peer.send(Renew(renewal=1))
    assert await peer.receive() == Renewed(renewal=1)
    await peer.aclose()


async def test_closed_network_breaks_open_streams_and_opens_no_new_ones(harness: NetworkHarness) -> None:
    address = await harness.add_worker(StubWorker(session=answer_acks))
    session = await harness.network.open_session(address)
    await harness.network.aclose()
    with pytest.raises(StreamBroken):
        await session.receive()
    with pytest.raises(StreamBroken):
        await harness.network.open_session(address)
