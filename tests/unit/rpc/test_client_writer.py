"""Only a client that leaves a message unread loses its connection."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc.aio
import pytest

from baton.core.errors import Reason, Refused
from baton.rpc.client_writer import ClientWriter
from baton.runtime.network.client_connections import ClientConnections
from baton.sim import virtual_time

PEER = "ipv4:192.0.2.1:5000"


class Connections(ClientConnections):
    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def end(self, peer: str) -> None:
        self.ended.append(peer)


class Call:
    """Context of a call whose client reads when `is_read` is set, or leaves with `failure`."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.is_read = asyncio.Event()
        self._failure = failure

    async def write(self, message: bytes) -> None:
        await self.is_read.wait()
        if self._failure is not None:
            raise self._failure

    def peer(self) -> str:
        return PEER

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self.end = lambda: callback(self)


def writer(read_s: float = 30.0) -> tuple[ClientWriter, Connections]:
    connections = Connections()
    return ClientWriter(connections, read_s=read_s), connections


def writing(written_by: ClientWriter, call: Call, message: bytes = b"x") -> "asyncio.Task[None]":
    return asyncio.create_task(written_by.write(cast(Any, call), message))


async def test_message_that_is_read_leaves_the_connection_open() -> None:
    one, connections = writer()
    call = Call()
    task = writing(one, call)
    call.is_read.set()
    await task
    one.cut_off(cast(Any, call))
    assert not connections.ended


async def test_message_that_is_not_read_in_time_ends_the_connection() -> None:
    one, connections = writer(read_s=0.01)
    with pytest.raises(asyncio.CancelledError, match=r"has not read for 0\.01"):
        await one.write(cast(Any, Call()), b"x")
    assert connections.ended == [PEER]


def test_long_message_has_more_time() -> None:
    async def scenario() -> None:
        one, connections = writer(read_s=0.01)
        task = writing(one, Call(), bytes(2**20))
        await asyncio.sleep(0.1)
        assert not task.done()
        assert not connections.ended
        task.cancel()

    virtual_time.run(scenario())


async def test_call_that_is_cancelled_leaves_the_connection_open() -> None:
    """grpc cancels the task of a call that its client has cancelled; others use the same connection."""
    one, connections = writer()
    task = writing(one, Call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not connections.ended


async def test_connection_ends_if_its_response_is_cut_off_while_it_is_written() -> None:
    one, connections = writer()
    call = Call()
    task = writing(one, call)
    await asyncio.sleep(0)
    one.cut_off(cast(Any, call))
    assert connections.ended == [PEER]
    task.cancel()


async def test_response_that_is_cut_off_before_it_is_written_is_refused() -> None:
    one, connections = writer()
    call = Call()
    one.cut_off(cast(Any, call))
    with pytest.raises(Refused, match="others needed its memory") as refused:
        await one.write(cast(Any, call), b"x")
    assert refused.value.failure.reason is Reason.MEMORY_BUDGET
    assert not connections.ended
    call.end()
    assert not one._cut


async def test_client_that_leaves_cancels_the_write() -> None:
    one, connections = writer()
    call = Call(grpc.aio.InternalError('Failed "execute_batch"'))
    call.is_read.set()
    with pytest.raises(asyncio.CancelledError, match="the connection has ended"):
        await one.write(cast(Any, call), b"x")
    assert not connections.ended
