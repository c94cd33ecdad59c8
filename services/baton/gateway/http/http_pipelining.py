"""Bounds the requests that one HTTP connection has under way.

A client may send requests before it gets the response to earlier ones. uvicorn parses all that it has
received, and continues to read with each response. A connection could then hold any number of requests.
"""

import asyncio
from collections import deque

from uvicorn.protocols.http.flow_control import FlowControl

MAX_PIPELINED = 16
"""Parsed requests that may wait for the response to an earlier one."""
HEAD_PIECE_BYTES, BODY_PIECE_BYTES = 4 * 1024, 16 * 1024
"""Bytes that are parsed at a time. A piece may hold two hundred requests, which take a few milliseconds."""
HEADER_BYTES = 160
"""Memory of a header beyond its bytes: a pair of byte strings in a list."""
REQUEST_BYTES = 2 * 1024
"""Memory of a parsed request without its headers and body."""


class PipelineFlow(FlowControl):
    """uvicorn's flow control, which does not read while received bytes are not parsed yet."""

    def __init__(self, transport: asyncio.Transport, unparsed: "UnparsedBytes") -> None:
        super().__init__(transport)
        self._unparsed = unparsed

    def resume_reading(self) -> None:
        """Resume reading, unless bytes wait to be parsed."""
        if not self._unparsed:
            super().resume_reading()


class QueuedHeads:
    """Memory of the heads of the parsed requests that wait, in the order in which they will be served."""

    def __init__(self) -> None:
        self._heads: deque[int] = deque()
        self.num_bytes = 0

    def add(self, head_bytes: int) -> None:
        """Count one more request."""
        self._heads.append(head_bytes + REQUEST_BYTES)
        self.num_bytes += self._heads[-1]

    def keep_last(self, number: int) -> None:
        """Forget all but the last requests, because the others are being served."""
        while len(self._heads) > number:
            self.num_bytes -= self._heads.popleft()


class UnparsedBytes:
    """Received bytes that are not parsed yet, because too many requests wait."""

    def __init__(self) -> None:
        self._data = b""
        self._at = 0

    def __len__(self) -> int:
        return len(self._data) - self._at

    def add(self, data: bytes) -> None:
        """Append received bytes."""
        self._data = self._data[self._at :] + data if self else data
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        """Remove and return the first `num_bytes`."""
        piece = self._data[self._at : self._at + num_bytes]
        self._at += len(piece)
        return piece

    def clear(self) -> None:
        """Drop all bytes."""
        self._data, self._at = b"", 0
