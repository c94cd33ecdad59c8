"""The contract of `Duplex`, for both ends of every implementation."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from baton.core.errors import StreamBroken
from baton.core.interfaces import Duplex
from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import Ack, Heartbeat, Step
from baton.runtime.network.in_process_network import duplex_pair
from tests import builders
from tests.contract.networks import (
    MAX_MESSAGES,
    StubWorker,
    eventually,
    is_broken,
    open_harness,
    until_broken,
)
from tests.times import LONG_LIMIT_S

pytestmark = pytest.mark.contract


@dataclass
class Ends:
    """Two ends of a stream. `near` is under test: it sends `message` and receives `answer`.

    is_server_end: `near` is the end at the server.
    end_service: lets the service of a gRPC stream return, which closes the server's end. A closing end, and
        the client for the end of the call, wait for that.
    """

    near: Duplex[Any, Any]
    far: Duplex[Any, Any]
    is_server_end: bool
    end_service: Callable[[], None] = lambda: None

    def message(self, seq: int) -> Any:
        return (
            Heartbeat(seq=seq, steps_done=seq, step_age_s=0.5, draining=False) if self.is_server_end else Ack(seq=seq)
        )

    def answer(self, seq: int) -> Any:
        return (
            Ack(seq=seq) if self.is_server_end else Heartbeat(seq=seq, steps_done=seq, step_age_s=0.5, draining=False)
        )

    def big(self) -> Any:
        """Return a message of about 400 kB."""
        if self.is_server_end:
            return Step(seq=1, deltas=(builders.token_delta(*range(1 << 28, (1 << 28) + 80_000)),))
        return builders.prefill_job(token_ids(range(100_000)))


@asynccontextmanager
async def in_process(is_server_end: bool) -> AsyncIterator[Ends]:
    near: Duplex[Any, Any]
    near, far = duplex_pair(MAX_MESSAGES)
    yield Ends(near, far, is_server_end)
    await near.aclose()
    await far.aclose()


@asynccontextmanager
async def over_grpc(is_server_end: bool) -> AsyncIterator[Ends]:
    accepted: asyncio.Future[Duplex[Any, Any]] = asyncio.get_running_loop().create_future()
    is_done = asyncio.Event()

    async def session(stream: Duplex[Any, Any]) -> None:
        accepted.set_result(stream)
        await is_done.wait()

    async with open_harness("grpc") as harness:
        client = await harness.network.open_session(await harness.add_worker(StubWorker(session=session)))
        server = await accepted
        near, far = (server, client) if is_server_end else (client, server)
        yield Ends(near, far, is_server_end, is_done.set)
        is_done.set()
        await server.aclose()
        await client.aclose()


IMPLEMENTATIONS = {"in_process": in_process, "grpc": over_grpc}


@pytest.fixture(params=[(name, is_server_end) for name in IMPLEMENTATIONS for is_server_end in (False, True)], ids=str)
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    name, is_server_end = request.param
    async with IMPLEMENTATIONS[name](is_server_end) as ends:
        yield ends


async def test_messages_in_both_directions_arrive_in_order(ends: Ends) -> None:
    batch = MAX_MESSAGES // 2  # some messages of the last batch may not have been sent yet
    for first in range(0, 32, batch):
        seqs = range(first, first + batch)
        for seq in seqs:
            ends.near.send(ends.message(seq))
            ends.far.send(ends.answer(seq))
        assert [await ends.far.receive() for _ in seqs] == [ends.message(seq) for seq in seqs]
        assert [await ends.near.receive() for _ in seqs] == [ends.answer(seq) for seq in seqs]


async def test_send_does_not_wait_for_the_event_loop(ends: Ends) -> None:
    for seq in range(MAX_MESSAGES):
        ends.near.send(ends.message(seq))
    assert await ends.far.receive() == ends.message(0)


async def test_messages_sent_before_close_arrive(ends: Ends) -> None:
    for seq in range(MAX_MESSAGES):
        ends.near.send(ends.message(seq))
    closing = asyncio.create_task(ends.near.aclose())
    if ends.is_server_end:
        ends.end_service()
    assert await until_broken(ends.far) == [ends.message(seq) for seq in range(MAX_MESSAGES)]
    ends.end_service()
    await closing
    with pytest.raises(StreamBroken):
        ends.far.send(ends.answer(1))


async def test_closed_end_breaks_immediately_even_with_unread_messages(ends: Ends) -> None:
    ends.far.send(ends.answer(1))
    await asyncio.sleep(0.02)
    closing = asyncio.create_task(ends.near.aclose())
    await asyncio.sleep(0)
    with pytest.raises(StreamBroken):
        ends.near.send(ends.message(1))
    with pytest.raises(StreamBroken):
        await ends.near.receive()
    ends.end_service()
    await closing


async def test_repeated_and_concurrent_close_breaks_both_ends(ends: Ends) -> None:
    closing = asyncio.gather(ends.near.aclose(), ends.near.aclose(), ends.far.aclose())
    await asyncio.sleep(0)
    ends.end_service()
    await closing
    await ends.near.aclose()
    assert _is_broken(ends)


async def test_cancelled_close_still_closes_the_stream(ends: Ends) -> None:
    closing = asyncio.create_task(ends.near.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    if ends.is_server_end:
        ends.end_service()
    assert await until_broken(ends.far) == []


async def test_waiting_receiver_is_woken_when_either_end_closes(ends: Ends) -> None:
    far, near = asyncio.create_task(ends.far.receive()), asyncio.create_task(ends.near.receive())
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(ends.near.aclose())
    await asyncio.sleep(0)
    if ends.is_server_end:
        ends.end_service()
    for waiting in (near, far):
        with pytest.raises(StreamBroken):
            await asyncio.wait_for(waiting, LONG_LIMIT_S)
    ends.end_service()
    await closing


async def test_receive_on_a_broken_stream_always_raises(ends: Ends) -> None:
    closing = asyncio.create_task(ends.far.aclose())
    await asyncio.sleep(0)
    if not ends.is_server_end:
        ends.end_service()
    await eventually(lambda: _is_broken(ends))
    for _ in range(2):
        with pytest.raises(StreamBroken):
            await ends.near.receive()
    ends.end_service()
    await closing


async def test_full_buffer_breaks_the_stream_at_both_ends(ends: Ends) -> None:
    big = ends.big()

    async def flood() -> None:
        while True:
            ends.near.send(big)
            await asyncio.sleep(0)

    with pytest.raises(StreamBroken, match="buffer is full"):
        await flood()
    with pytest.raises(StreamBroken):
        ends.near.send(ends.message(1))
    with pytest.raises(StreamBroken):
        await ends.near.receive()
    if ends.is_server_end:
        ends.end_service()
    async with asyncio.timeout(LONG_LIMIT_S):
        arrived = await until_broken(ends.far)
    assert arrived == [big] * len(arrived)


async def test_messages_received_in_batches_are_not_lost(ends: Ends) -> None:
    for seq in range(50):
        ends.near.send(ends.message(seq))
        if seq % 3 == 2:
            for back in (2, 1, 0):
                assert await ends.far.receive() == ends.message(seq - back)
                await asyncio.sleep(0)


async def test_cancelled_receive_loses_no_message(ends: Ends) -> None:
    for seq in range(20):
        waiting = asyncio.create_task(ends.far.receive())
        await asyncio.sleep(0)
        ends.near.send(ends.message(seq))
        for _ in range(seq % 4):
            await asyncio.sleep(0)
        waiting.cancel()
        received = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if isinstance(received, BaseException):
            received = await ends.far.receive()
        assert received == ends.message(seq)


def _is_broken(ends: Ends) -> bool:
    return is_broken(ends.near, ends.message(1))
