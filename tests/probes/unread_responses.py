"""A gRPC client that keeps its connection alive, but lets the server send no response."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.malformed_connections import ACK, HTTP2_START, PING, SETTINGS, frame

INITIAL_WINDOW_SIZE = 4
"""Id of the HTTP/2 setting."""
START_WITHOUT_WINDOW = HTTP2_START + frame(SETTINGS, INITIAL_WINDOW_SIZE.to_bytes(2, "big") + bytes(4))


class UnreadResponses:
    """One connection. `has_ended` is set when the server ends it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.has_ended = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def run(cls, host: str, port: int, calls: bytes) -> AsyncIterator["UnreadResponses"]:
        """Send the calls (frames of HTTP/2) and answer all pings until the context ends."""
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(START_WITHOUT_WINDOW + calls)
        connection = cls(writer)
        answering = asyncio.create_task(connection._answer(reader))
        try:
            yield connection
        finally:
            answering.cancel()
            await asyncio.wait((answering,))
            writer.transport.abort()

    def send(self, frames: bytes) -> None:
        """Send more frames."""
        self._writer.write(frames)

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] in (PING, SETTINGS) and not head[4] & ACK:
                    self.send(frame(head[3], payload if head[3] == PING else b"", flags=ACK))
        self.has_ended.set()
