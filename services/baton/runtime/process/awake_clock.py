"""A clock that stands still while this process's event loop is stalled, and the measurement of stalls.

A peer counts as silent if it sent nothing for some time. While the own loop is stalled, because a callback
runs too long or the process was suspended, messages that have arrived are not read. That time must not count.
"""

import asyncio
from collections.abc import Callable

TICK_S = 0.1
"""Interval of the ticks that show that the loop runs."""
MAX_TICK_S = 2 * TICK_S
"""Longest time between two ticks that counts as awake. The rest of a longer one is a stall."""


class AwakeClock:
    """Seconds during which an event loop was not stalled. Use from the loop's own thread."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Create a clock. `now` is the loop's clock. The clock follows it exactly until `run` is started."""
        self._now = now
        self._ticked_s: float | None = None
        self._awake_s = 0.0

    def __call__(self) -> float:
        """Return the awake time in seconds. Only differences have a meaning."""
        now_s = self._now()
        if self._ticked_s is None:
            return now_s
        return self._awake_s + min(now_s - self._ticked_s, MAX_TICK_S)

    async def run(self, observe: Callable[[float, float], None]) -> None:
        """Tick until cancelled. After each tick `observe` gets how late it came, and the stall in seconds."""
        self._awake_s = self._ticked_s = self._now()
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self._tick(observe)
        finally:
            self._ticked_s = None

    def _tick(self, observe: Callable[[float, float], None]) -> None:
        assert self._ticked_s is not None  # set by `run`
        now_s = self._now()
        took_s = now_s - self._ticked_s
        self._awake_s += min(took_s, MAX_TICK_S)
        self._ticked_s = now_s
        observe(max(0.0, took_s - TICK_S), max(0.0, took_s - MAX_TICK_S))
