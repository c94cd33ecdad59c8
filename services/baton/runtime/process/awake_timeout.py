"""Timeouts that do not count the time during which this process's event loop is stalled.

After a stall, `asyncio.timeout` ends a call before its answer is read, although the answer may have arrived
in time. A healthy peer would then count as failed.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Longest duration of an operation.

    seconds: the duration; None sets no limit.
    awake_clock: clock that measures it, see `AwakeClock`; None uses the event loop's.
    """

    seconds: float | None
    awake_clock: Callable[[], float] | None = None

    def timeout(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager that raises TimeoutError if its body takes longer."""
        if self.seconds is None or self.awake_clock is None:
            return asyncio.timeout(self.seconds)
        return _AwakeTimeout(self.seconds, self.awake_clock)


class _AwakeTimeout:
    """`asyncio.timeout` by another clock: its timer is set again until that clock agrees that time is up."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._end_s = self._clock() + self._seconds
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._check)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _check(self) -> None:
        loop, left_s = asyncio.get_running_loop(), self._end_s - self._clock()
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._check)
        else:
            self._timeout.reschedule(loop.time())
