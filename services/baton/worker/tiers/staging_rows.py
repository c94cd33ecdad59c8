"""The rows of a staging buffer through which blocks are copied between a device and a disk."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


class StagingRows:
    """Grants rows in the order of the calls, so that the buffer is all the memory that loads take.

    Used from one event loop.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.num_rows = len(rows)
        self._free = list(rows)
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[list[int]]:
        """Wait for `count` rows, at most `num_rows`, and keep them until the end of the block."""
        granted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, granted))
        self._grant()
        try:
            yield await granted
        finally:
            if granted.done() and not granted.cancelled():
                self._free += granted.result()
            else:
                self._waiting = deque(each for each in self._waiting if each[1] is not granted)
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= len(self._free):
            count, granted = self._waiting.popleft()
            if not granted.done():
                rows, self._free = self._free[:count], self._free[count:]
                granted.set_result(rows)
