"""The events of a stream between the task that adds them and the task that writes them."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator

from baton.gateway.http.asgi_io import PIECE_BYTES, in_pieces
from baton.gateway.request.unread_output import UnreadOutput


class EventQueue:
    """Holds events until they are written. Events that arrive together leave in one write of about
    `PIECE_BYTES`."""

    def __init__(self, unread: UnreadOutput) -> None:
        """Create an empty queue. `unread` counts the events that are not written yet."""
        self._unread = unread
        self._pending: deque[bytes | Iterator[bytes]] = deque()
        self._num_uncounted = 0
        self._num_written = 0
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False

    def put(self, *pieces: bytes) -> None:
        """Add an event in one or more pieces. Raises Refused (slow_reader) if too many bytes are unread."""
        self._unread.add(sum(map(len, pieces)))
        self._pending += pieces
        self._wake()

    def put_uncounted(self, *parts: bytes | bytearray) -> None:
        """Add an event whose bytes do not count as unread: its parts are also held elsewhere, or it is the
        last."""
        self._num_uncounted += sum(map(len, parts))
        self._pending.append(in_pieces(parts))
        self._wake()

    def end(self) -> None:
        """Record that no more events will be added."""
        self._has_ended = True
        self._wake()

    @property
    def num_bytes(self) -> int:
        """Bytes that are still to be written."""
        return self._unread.num_bytes + self._num_uncounted

    @property
    def is_exhausted(self) -> bool:
        """True if all events were taken and no more will be added."""
        return self._has_ended and not self._pending

    def drop(self) -> None:
        """Drop all events, because the client does not read them."""
        self._pending.clear()
        self._num_uncounted = 0

    async def next_piece(self) -> bytes:
        """Wait for events, and return as many as a piece holds; empty after the end.

        The piece counts as unread until the next call, since the caller is still writing it. Only one task
        may wait.
        """
        self._unread.remove(self._num_written)
        self._num_written = 0
        if not self._pending and not self._has_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return b"".join(self._taken())

    def _taken(self) -> Iterable[bytes]:
        """Yield events, and pieces of uncounted events, for one write."""
        num_bytes = 0
        while self._pending and num_bytes < PIECE_BYTES:
            first = self._pending[0]
            if isinstance(first, bytes):
                self._pending.popleft()
                self._num_written += len(first)
            else:
                piece = next(first, None)
                if piece is None:
                    self._pending.popleft()
                    continue
                self._num_uncounted -= len(piece)
                first = piece
            num_bytes += len(first)
            yield first

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
