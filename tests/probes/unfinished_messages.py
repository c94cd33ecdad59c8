"""Sends gRPC messages that never end, as fast as HTTP/2 flow control allows."""

import asyncio
from contextlib import suppress

from tests.malformed_connections import (
    ACK,
    DATA,
    END_HEADERS,
    HEADERS,
    HTTP2_START,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    field_block,
    frame,
    grpc_message,
    request_head,
)

GENERATE = "/baton.v1.Inference/Generate"
MESSAGE_BYTES = 7 * 2**20
PIECE = b"x" * 16_384
DEFAULT_WINDOW = 65_535
LIMIT_S = 60.0
INITIAL_WINDOW_SIZE = 4
"""Id of the HTTP/2 setting."""


class UnfinishedMessages:
    """One connection with calls whose messages lack their last byte."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_calls: int, at_least: int
    ) -> None:
        self._reader, self._writer = reader, writer
        self._at_least = at_least
        self._has_sent_enough = asyncio.Event()
        self._initial = self._connection_window = DEFAULT_WINDOW
        self._windows = dict.fromkeys(range(1, 2 * num_calls, 2), 0)
        self._left = dict.fromkeys(self._windows, MESSAGE_BYTES - 1)
        self._changed = asyncio.Event()
        self._sent_bytes = 0

    @classmethod
    async def run(
        cls,
        host: str,
        port: int,
        num_calls: int,
        seconds: float,
        method: str = GENERATE,
        *,
        together: asyncio.Barrier | None = None,
        at_least: int = 0,
        **head: bytes,
    ) -> int:
        """Send until the time is over or the server closes the connection. Return the bytes of messages sent.

        together: the connection stays open until all who share this barrier have sent.
        at_least: bytes of messages that are sent before the time begins, unless that takes `LIMIT_S`.
        head: more header fields of each call.
        """
        reader, writer = await asyncio.open_connection(host, port)
        one = cls(reader, writer, num_calls, at_least)
        reading = asyncio.create_task(one._read())
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(LIMIT_S) as limit:
                timing = asyncio.create_task(one._limit_time(limit, seconds))
                await one._send(reading, field_block(request_head(method, **head)))
        timing.cancel()
        if together is not None:
            await together.wait()
        reading.cancel()
        await asyncio.wait((reading,))
        writer.transport.abort()
        return one._sent_bytes

    async def _send(self, reading: asyncio.Task[None], head: bytes) -> None:
        self._writer.write(HTTP2_START)
        for stream in self._windows:
            self._writer.write(frame(HEADERS, head, flags=END_HEADERS, stream=stream))
            self._windows[stream] += self._initial
            self._write(stream, grpc_message(b"", length=MESSAGE_BYTES))
        while not reading.done():
            self._changed.clear()
            for stream in list(self._left):
                while piece := PIECE[: min(self._left[stream], self._windows[stream], self._connection_window)]:
                    self._left[stream] -= len(piece)
                    self._write(stream, piece)
                    await self._writer.drain()
            await self._changed.wait()

    async def _limit_time(self, limit: asyncio.Timeout, seconds: float) -> None:
        """End after `seconds` from when enough was sent."""
        await self._has_sent_enough.wait()
        limit.reschedule(asyncio.get_running_loop().time() + seconds)

    def _write(self, stream: int, payload: bytes) -> None:
        self._windows[stream] -= len(payload)
        self._connection_window -= len(payload)
        self._sent_bytes += len(payload)
        if self._sent_bytes >= self._at_least:
            self._has_sent_enough.set()
        self._writer.write(frame(DATA, payload, stream=stream))

    async def _read(self) -> None:
        """Follow the server's windows. A reset call sends no more."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)
        self._changed.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            grown = int.from_bytes(payload, "big")
            if stream:
                self._windows[stream] += grown
            else:
                self._connection_window += grown
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == INITIAL_WINDOW_SIZE:
                    size = int.from_bytes(payload[at + 2 : at + 6], "big")
                    for each in self._windows:
                        self._windows[each] += size - self._initial
                    self._initial = size
            self._writer.write(frame(SETTINGS, flags=ACK))
        elif kind == PING and not flags & ACK:  # the server grows its windows only if its pings are answered
            self._writer.write(frame(PING, payload, flags=ACK))
        elif kind in (RST_STREAM, HEADERS):
            self._left[stream] = 0
        self._changed.set()
