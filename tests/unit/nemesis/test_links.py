"""A cut link of the loopback network delivers nothing, neither bytes nor ends, and knows its processes."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.nemesis.links import LoopbackLinks

A, B = "p0", "gateway"
LONG_S = 30.0
BLOCKED_S = 0.2


class Echo:
    """A server that answers each piece with the same bytes. `ended`: set when a connection ends there."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(100):
                writer.write(piece)
        except OSError:
            pass
        self.ended.set()
        writer.close()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[LoopbackLinks, Echo]]:
    """Process `p0` answers at its address; `gateway` connects from its own."""
    links, echo = LoopbackLinks({A: {}, B: {}}), Echo()
    await links.open((A,))
    server = await asyncio.start_server(echo.serve, "127.0.0.1", int(links.place(A).settings["rpc_port"]))
    try:
        yield links, echo
    finally:
        server.close()
        await links.aclose()


async def connect(links: LoopbackLinks, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = links.place(A).settings
    return await asyncio.open_connection(str(place["advertise_host"]), int(place["rpc_port"]), local_addr=(source, 0))


async def test_probe_passes_unless_the_link_is_cut() -> None:
    async with linked() as (links, _):
        assert await links.passes(A, B, LONG_S)
        assert await links.passes(B, A, LONG_S)
        links.cut(B, A)
        assert not await links.passes(A, B, BLOCKED_S)
        links.heal(A, B)
        assert await links.passes(A, B, LONG_S)
        assert links.strangers() == []


async def test_open_connection_gets_its_bytes_after_the_cut() -> None:
    async with linked() as (links, _):
        reader, writer = await connect(links, str(links.place(B).environ["SOURCE_ADDRESS"]))
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        links.cut(A, B)
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), BLOCKED_S)
        links.heal(A, B)
        assert await reader.readexactly(3) == b"two"
        writer.transport.abort()


@pytest.mark.parametrize("has_error", [False, True], ids=["end", "reset"])
async def test_end_of_a_connection_arrives_after_the_cut(has_error: bool) -> None:
    async with linked() as (links, echo):
        reader, writer = await connect(links, str(links.place(B).environ["SOURCE_ADDRESS"]))
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        links.cut(A, B)
        if has_error:
            linger = struct.pack("ii", 1, 0)
            writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(echo.ended.wait(), BLOCKED_S)
        links.heal(A, B)
        async with asyncio.timeout(LONG_S):
            await echo.ended.wait()


async def test_connection_from_an_unknown_address_is_reported() -> None:
    async with linked() as (links, _):
        reader, writer = await connect(links, "127.0.0.1")
        links.cut(A, B)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one", "the cut does not hold it back"
        assert links.strangers() == ["p0 was reached from 127.0.0.1, which is the address of no process"]
        writer.transport.abort()
