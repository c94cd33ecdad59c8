"""The channel between two processes that measure two-sided reads, and how backends use it.

Workers exchange the same messages on the stream of a pair. Here they are lines of JSON on a Unix socket, in a
directory that only this user can open. One-sided backends need no channel.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from baton.core.ids import ReadId, TransferId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage, WillRead
from baton.core.plain_json import from_plain, to_plain
from baton.transfer.backend import KvDescriptor, TransferBackend

MAX_LINE_BYTES = 2**20
"""Longest line. The value of a group has some hundred bytes, a read at most a few thousand block ids."""

Announce = Callable[[ReadId, KvDescriptor], None]
"""Tells the owner which blocks a read takes. Call it after each start of a read, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMessage:
    """One line of the channel. One of the fields is set."""

    group: GroupMessage | None = None
    will_read: WillRead | None = None


class PairChannel:
    """Sends and receives messages. Used from one event loop."""

    def __init__(self, incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, message: PairMessage) -> None:
        """Send a message. It is lost if the other process has ended."""
        self._outgoing.write(json.dumps(to_plain(message)).encode() + b"\n")

    def send_group(self, message: GroupMessage) -> None:
        """Send a message of a process group, as `SendGroup`."""
        self.send(PairMessage(group=message))

    async def receive(self) -> PairMessage | None:
        """Return the next message; None if the other process has closed the channel, or has ended.

        Raises ValueError for a line that is no message.
        """
        try:
            line = await self._incoming.readline()
        except ConnectionError:
            return None
        return from_plain(PairMessage, json.loads(line)) if line else None

    def close(self) -> None:
        """Close the channel once all messages are sent."""
        self._outgoing.close()


@asynccontextmanager
async def serve_reads(backend: TransferBackend, reader: WorkerRef) -> AsyncIterator[str]:
    """Serve the reads of another process while the block runs.

    Yields the path of the channel for `connect_reads`; empty if the backend needs none.
    """
    if not backend.is_two_sided(backend.memory[0]):
        yield ""
        return
    serving: list[asyncio.Task[None]] = []

    def accept(incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        serving.append(asyncio.create_task(_serve(backend, reader, PairChannel(incoming, outgoing))))

    with tempfile.TemporaryDirectory(prefix="baton-") as directory:  # its mode is 0700
        path = str(Path(directory) / "pair")
        server = await asyncio.start_unix_server(accept, path, limit=MAX_LINE_BYTES)
        try:
            yield path
        finally:
            server.close()
            for each in serving:
                await _ended(each)


@asynccontextmanager
async def connect_reads(
    backend: TransferBackend, peer: KvMemory, layout: KvLayout, path: str
) -> AsyncIterator[Announce]:
    """Keep a backend connected to the memory of another process while the block runs.

    path: of the channel; empty if the backend needs none. Raises LayoutMismatch as `connect` does.
    """
    if not path:
        backend.connect(peer, layout)
        try:
            yield lambda read_id, source: None
        finally:
            backend.forget(peer)
        return
    channel = PairChannel(*await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES))

    def announce(read_id: ReadId, source: KvDescriptor) -> None:
        message = WillRead(transfer_id=TransferId(0), read_id=read_id, block_ids=source.block_ids)
        channel.send(PairMessage(will_read=message))

    backend.connect(peer, layout, channel.send_group)
    receiving = asyncio.create_task(_receive(backend, peer, channel))
    try:
        yield announce
    finally:
        backend.forget(peer)
        channel.close()
        await _ended(receiving)


async def _serve(backend: TransferBackend, reader: WorkerRef, channel: PairChannel) -> None:
    server = backend.serve(reader, channel.send_group)
    try:
        while (message := await channel.receive()) is not None:
            if message.group is not None:
                server.receive(message.group)
            if message.will_read is not None:
                server.expect_read(message.will_read.read_id, message.will_read.block_ids)
    finally:
        server.close()
        channel.close()


async def _receive(backend: TransferBackend, peer: KvMemory, channel: PairChannel) -> None:
    while (message := await channel.receive()) is not None:
        if message.group is not None:
            backend.receive(peer, message.group)


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end. Raises the error with which it has failed."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
