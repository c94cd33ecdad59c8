"""Buffers of the streams of one process share an account. If it is full, the largest stream breaks."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.core.errors import Reason, StreamBroken
from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import Ack
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.streams.grpc_streams import Codec, ServerDuplex
from baton.rpc.streams.stream_limits import stream_limits
from baton.runtime.process.byte_budget import Account, ByteBudget
from tests import builders
from tests.contract.networks import Serve, StubWorker, eventually

HEARTBEAT_S, DIAL_S = 10.0, 60.0
MIB = 2**20
BIG = builders.prefill_job(token_ids(range(1 << 28, (1 << 28) + 50_000)))
"""A message of about 250 kB."""


@asynccontextmanager
async def network_with(budget: ByteBudget, *sessions: Serve) -> AsyncIterator[tuple[GrpcNetwork, list[str]]]:
    """A network whose streams share `budget`, and the addresses of workers that serve these sessions."""
    network, servers, addresses = (
        GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=DIAL_S, limits=stream_limits(budget)),
        [],
        [],
    )
    for session in sessions:
        server = GrpcServer(heartbeat_s=HEARTBEAT_S)
        server.add_worker(StubWorker(session=session))
        servers.append(server)
        addresses.append(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    try:
        yield network, addresses
    finally:
        await network.aclose()
        for server in servers:
            await server.stop(0)


async def test_slow_stream_breaks_when_the_buffers_of_the_process_are_full_and_the_fast_one_stays() -> None:
    budget, can_return = ByteBudget({Account.STREAMS: 4 * MIB}), asyncio.Event()

    async def ignore(_: object) -> None:
        await can_return.wait()

    async def read(stream: object) -> None:
        while True:
            await stream.receive()  # type: ignore[attr-defined]

    async with network_with(budget, ignore, read) as (network, (slow_address, fast_address)):
        slow, fast = await network.open_session(slow_address), await network.open_session(fast_address)
        while budget.used(Account.STREAMS) < 3 * MIB:
            slow.send(BIG)
            await asyncio.sleep(0)
        held_bytes = budget.used(Account.STREAMS)
        for _ in range((4 * MIB - held_bytes) // 200_000 + 2):  # at once, so that nothing can be sent meanwhile
            fast.send(BIG)
        assert budget.used(Account.STREAMS) <= 4 * MIB
        with pytest.raises(StreamBroken, match="this stream has the most buffered bytes") as broken:
            slow.send(Ack(seq=1))
        assert broken.value.failure is not None
        assert broken.value.failure.reason is Reason.SLOW_READER
        fast.send(Ack(seq=1))
        await eventually(lambda: budget.used(Account.STREAMS) == 0)
        can_return.set()


async def test_closed_stream_gives_its_bytes_back() -> None:
    budget, can_return = ByteBudget({Account.STREAMS: 64 * MIB}), asyncio.Event()

    async def ignore(_: object) -> None:
        await can_return.wait()

    async with network_with(budget, ignore) as (network, (address,)):
        stream = await network.open_session(address)
        while budget.used(Account.STREAMS) < 2 * MIB:
            stream.send(BIG)
            await asyncio.sleep(0)
        can_return.set()
        await stream.aclose()
        assert budget.used(Account.STREAMS) == 0


async def test_received_messages_that_wait_are_few_bytes_and_count() -> None:
    """Several messages fit into the limit of their number, but not into that of their bytes."""
    budget, can_read = ByteBudget({Account.STREAMS: 64 * MIB}), asyncio.Event()
    received: list[object] = []

    async def read_later(stream: object) -> None:
        await can_read.wait()
        while True:
            received.append(await stream.receive())  # type: ignore[attr-defined]

    server = GrpcServer(heartbeat_s=HEARTBEAT_S, limits=stream_limits(budget))
    server.add_worker(StubWorker(session=read_later))
    network = GrpcNetwork(heartbeat_s=HEARTBEAT_S, dial_s=DIAL_S)
    stream = await network.open_session(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    for _ in range(20):
        stream.send(BIG)
    await eventually(lambda: budget.used(Account.STREAMS) >= MIB)
    await asyncio.sleep(0.2)
    assert budget.used(Account.STREAMS) < 1.5 * MIB
    can_read.set()
    await eventually(lambda: len(received) == 20)
    assert budget.used(Account.STREAMS) == 0
    await network.aclose()
    await server.stop(0)


class Sized:
    """Stands for a protobuf message; these cannot be watched."""

    def ByteSize(self) -> int:  # noqa: N802
        return 100


class NeverRead:
    """A call whose other end neither reads nor sends."""

    async def read(self) -> object:
        return await asyncio.Event().wait()

    async def write(self, message: object) -> None:
        await asyncio.Event().wait()


async def test_stream_that_is_cut_off_drops_its_messages_at_once() -> None:
    """Its handler may take some time to end, and others use the freed budget meanwhile."""
    budget = ByteBudget({Account.STREAMS: 1000})
    limits = stream_limits(budget)
    messages: list[weakref.ref[Sized]] = []

    def to_wire(_: object) -> Sized:
        message = Sized()
        messages.append(weakref.ref(message))
        return message

    codec = Codec(to_wire, lambda message: message)
    slow, fast = (ServerDuplex(NeverRead(), codec, limits, "peer") for _ in range(2))
    for _ in range(8):
        slow.send("x")
    await asyncio.sleep(0)
    for _ in range(3):
        fast.send("x")
    assert budget.used(Account.STREAMS) == 300
    assert [message() is not None for message in messages] == [True, *[False] * 7, *[True] * 3]  # the first is written
    for stream in (slow, fast):
        await stream.stop()
    assert budget.used(Account.STREAMS) == 0
