"""The contract of `Duplex`, for both ends of every implementation."""

import asyncio
from collections.abc import AsyncIterator
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
from tests.contract.networks import MAX_MESSAGES, StubWorker, eventually, until_broken, world_of

pytestmark = pytest.mark.contract


@dataclass
class Ends:
    """`near` is the end under test; it sends what `message` makes, and gets what `answer` makes."""

    near: Duplex[Any, Any]
    far: Duplex[Any, Any]
    dialled: bool

    def message(self, seq: int) -> Any:
        return Heartbeat(seq=seq, steps_done=seq, step_age_s=0.5, draining=False) if self.dialled else Ack(seq=seq)

    def answer(self, seq: int) -> Any:
        return Ack(seq=seq) if self.dialled else Heartbeat(seq=seq, steps_done=seq, step_age_s=0.5, draining=False)

    def big(self) -> Any:
        """Some 400 kB."""
        if self.dialled:
            return Step(seq=1, deltas=(builders.token_delta(*range(1 << 28, (1 << 28) + 80_000)),))
        return builders.prefill_job(token_ids(range(100_000)))


@asynccontextmanager
async def in_process(dialled: bool) -> AsyncIterator[Ends]:
    near: Duplex[Any, Any]
    near, far = duplex_pair(MAX_MESSAGES)
    yield Ends(near, far, dialled)
    await near.aclose()
    await far.aclose()


@asynccontextmanager
async def over_grpc(dialled: bool) -> AsyncIterator[Ends]:
    taken: asyncio.Future[Duplex[Any, Any]] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def session(stream: Duplex[Any, Any]) -> None:
        taken.set_result(stream)
        await over.wait()

    async with world_of("grpc") as world:
        client = await world.network.open_session(await world.add_worker(StubWorker(session=session)))
        server = await taken
        yield Ends(server, client, dialled) if dialled else Ends(client, server, dialled)
        over.set()
        await server.aclose()
        await client.aclose()


IMPLEMENTATIONS = {"in_process": in_process, "grpc": over_grpc}


@pytest.fixture(params=[(name, dialled) for name in IMPLEMENTATIONS for dialled in (False, True)], ids=str)
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    name, dialled = request.param
    async with IMPLEMENTATIONS[name](dialled) as ends:
        yield ends


async def test_messages_keep_their_order_in_both_directions_at_once(ends: Ends) -> None:
    at_once = MAX_MESSAGES // 2  # the last ones of those before may still be on their way out
    for first in range(0, 32, at_once):
        seqs = range(first, first + at_once)
        for seq in seqs:
            ends.near.send(ends.message(seq))
            ends.far.send(ends.answer(seq))
        assert [await ends.far.receive() for _ in seqs] == [ends.message(seq) for seq in seqs]
        assert [await ends.near.receive() for _ in seqs] == [ends.answer(seq) for seq in seqs]


async def test_sending_never_waits(ends: Ends) -> None:
    """A bounded number of messages goes out without the event loop's having had a turn."""
    for seq in range(MAX_MESSAGES):
        ends.near.send(ends.message(seq))
    assert await ends.far.receive() == ends.message(0)


async def test_the_other_end_gets_what_was_sent_before_the_close(ends: Ends) -> None:
    for seq in range(MAX_MESSAGES):
        ends.near.send(ends.message(seq))
    closing = asyncio.create_task(ends.near.aclose())
    assert await until_broken(ends.far) == [ends.message(seq) for seq in range(MAX_MESSAGES)]
    await closing
    with pytest.raises(StreamBroken):
        ends.far.send(ends.answer(1))


async def test_a_closed_end_is_dead_at_once(ends: Ends) -> None:
    ends.far.send(ends.answer(1))
    await asyncio.sleep(0.02)
    closing = asyncio.create_task(ends.near.aclose())
    await asyncio.sleep(0)
    with pytest.raises(StreamBroken):
        ends.near.send(ends.message(1))
    with pytest.raises(StreamBroken):
        await ends.near.receive()
    await closing


async def test_a_close_may_be_repeated_and_overlap(ends: Ends) -> None:
    await asyncio.gather(ends.near.aclose(), ends.near.aclose(), ends.far.aclose())
    await ends.near.aclose()


async def test_a_close_that_is_cancelled_still_closes(ends: Ends) -> None:
    closing = asyncio.create_task(ends.near.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert await until_broken(ends.far) == []


async def test_waiting_receiver_is_woken_when_either_end_closes(ends: Ends) -> None:
    far, near = asyncio.create_task(ends.far.receive()), asyncio.create_task(ends.near.receive())
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(ends.near.aclose())
    for waiting in (near, far):
        with pytest.raises(StreamBroken):
            await asyncio.wait_for(waiting, 2)
    await closing


async def test_a_broken_stream_stays_broken(ends: Ends) -> None:
    await ends.far.aclose()
    await eventually(lambda: _is_broken(ends))
    for _ in range(2):
        with pytest.raises(StreamBroken):
            await ends.near.receive()


async def test_a_full_buffer_ends_the_stream_at_both_ends(ends: Ends) -> None:
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
    async with asyncio.timeout(5):
        arrived = await until_broken(ends.far)
    assert arrived == [big] * len(arrived)


async def test_a_slow_receiver_that_keeps_up_loses_nothing(ends: Ends) -> None:
    for seq in range(50):
        ends.near.send(ends.message(seq))
        if seq % 3 == 2:
            for back in (2, 1, 0):
                assert await ends.far.receive() == ends.message(seq - back)
                await asyncio.sleep(0)


async def test_a_cancelled_receive_loses_nothing(ends: Ends) -> None:
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
    try:
        ends.near.send(ends.message(1))
    except StreamBroken:
        return True
    return False
