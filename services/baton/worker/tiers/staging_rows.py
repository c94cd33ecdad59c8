"""The rows of a staging buffer through which blocks are copied between a device and a disk."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


class StagingRows:
    """Lends rows in the order of the calls, so that the buffer is all the memory that loads take.

    Used from one event loop.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.num_rows = len(rows)
        self._free = list(rows)
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[list[int]]:
        """Wait for `count` rows, which must be at most `num_rows`, and keep them until the end of the block."""
        lent: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, lent))
        self._lend()
        try:
            yield await lent
        finally:
            if lent.done() and not lent.cancelled():
                self._free += lent.result()
            self._waiting = deque(each for each in self._waiting if each[1] is not lent)
            self._lend()

    def _lend(self) -> None:
        while self._waiting and self._waiting[0][0] <= len(self._free):
            count, lent = self._waiting.popleft()
            if not lent.done():
                rows, self._free = self._free[:count], self._free[count:]
                lent.set_result(rows)
