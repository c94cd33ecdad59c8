"""A server ends a stream while the client writes: the failure arrives, and nothing is left of the call."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from baton.core.errors import Reason, Refused, StreamBroken
from baton.core.interfaces import Duplex
from baton.core.messages.jobs import Ack, Step
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.streams.stream_limits import StreamLimits
from tests import builders
from tests.contract.networks import StubWorker, eventually
from tests.times import LONG_LIMIT_S


async def _write(session: Duplex[Any, Any]) -> None:
    """Keep messages in the write of grpc until the stream breaks."""
    with suppress(StreamBroken):
        while True:
            session.send(Ack(seq=1))
            await asyncio.sleep(0)


async def test_refusal_reaches_a_gateway_that_still_writes() -> None:
    failure = builders.failure(Reason.QUEUE_FULL, message="no space", retry_after_s=2.5)

    async def refuse(stream: Duplex[Any, Any]) -> None:
        await stream.receive()
        raise Refused(failure)

    limits = StreamLimits(max_messages=1_000_000)
    server = GrpcServer(heartbeat_s=LONG_LIMIT_S, limits=limits)
    server.add_worker(StubWorker(session=refuse))
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    network = GrpcNetwork(heartbeat_s=LONG_LIMIT_S, dial_s=LONG_LIMIT_S, call_s=LONG_LIMIT_S, limits=limits)
    try:
        for _ in range(20):  # more than half of the refusals come during a write
            session = await network.open_session(address)
            writing = asyncio.create_task(_write(session))
            with pytest.raises(StreamBroken) as broken:
                await session.receive()
            await writing
            await session.aclose()
            assert broken.value.failure == failure
    finally:
        await network.aclose()
        await server.stop(0)


def _calls_of_grpc() -> list[asyncio.Task[Any]]:
    """Return the tasks in which grpc waits for the status of a client's call."""
    return [task for task in asyncio.all_tasks() if "_handle_status" in getattr(task.get_coro(), "__qualname__", "")]


async def test_end_with_unread_messages_and_a_failed_write_ends_the_call() -> None:
    """grpc.aio counts such a call as ended, but its core keeps it and its messages until it is cancelled."""

    async def send_steps(stream: Duplex[Any, Any]) -> None:
        await stream.receive()
        for seq in range(100):
            stream.send(Step(seq=seq, deltas=(builders.token_delta(seq),)))

    server = GrpcServer(heartbeat_s=LONG_LIMIT_S)
    server.add_worker(StubWorker(session=send_steps))
    limits = StreamLimits(max_messages=1_000_000, max_received=1)
    network = GrpcNetwork(heartbeat_s=LONG_LIMIT_S, dial_s=LONG_LIMIT_S, call_s=LONG_LIMIT_S, limits=limits)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        for _ in range(3):
            session = await network.open_session(address)
            await _write(session)
            await session.aclose()
        await eventually(lambda: not _calls_of_grpc())
    finally:
        await network.aclose()
        await server.stop(0)


async def test_service_that_does_not_return_is_cancelled_though_the_call_is_cancelled_first() -> None:
    """The server already waits for the return of the service when the client cancels the call."""
    has_closed = asyncio.Event()

    async def close_and_stay(stream: Duplex[Any, Any]) -> None:
        await stream.aclose()
        has_closed.set()
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    worker = StubWorker(session=close_and_stay)
    server = GrpcServer(heartbeat_s=LONG_LIMIT_S, limits=StreamLimits(close_s=1.0))
    server.add_worker(worker)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    network = GrpcNetwork(
        heartbeat_s=LONG_LIMIT_S, dial_s=LONG_LIMIT_S, call_s=LONG_LIMIT_S, limits=StreamLimits(close_s=0.0)
    )
    try:
        session = await network.open_session(address)
        await has_closed.wait()
        await session.aclose()
        await eventually(lambda: worker.ended == 1)
    finally:
        await network.aclose()
        await server.stop(0)
    await eventually(lambda: asyncio.all_tasks() <= before)
