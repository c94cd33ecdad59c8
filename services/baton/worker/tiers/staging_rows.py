"""The rows of a staging buffer through which blocks are copied between a device and a disk."""

import asyncio
from collections import deque
from collections.abc import Sequence


class StagingRows:
    """Grants rows in the order of the calls, so that the buffer is all the memory that loads take.

    Used from one event loop.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.num_rows = len(rows)
        self._free = list(rows)
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    async def take(self, count: int, until_s: float | None = None) -> list[int] | None:
        """Wait for `count` rows, at most `num_rows`, which the caller must give back.

        Returns None if they are not free by `until_s`, event loop time. None sets no limit.
        """
        granted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, granted))
        self._grant()
        try:
            async with asyncio.timeout_at(until_s):
                return await granted
        except (TimeoutError, asyncio.CancelledError) as error:
            self._waiting = deque(each for each in self._waiting if each[1] is not granted)
            if granted.done() and not granted.cancelled():
                self.give_back(granted.result())
            else:
                self._grant()
            if isinstance(error, TimeoutError):
                return None
            raise

    def give_back(self, rows: Sequence[int]) -> None:
        """Make rows free again, when nothing reads or writes them."""
        self._free += rows
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= len(self._free):
            count, granted = self._waiting.popleft()
            if not granted.done():
                rows, self._free = self._free[:count], self._free[count:]
                granted.set_result(rows)
