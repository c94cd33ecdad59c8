"""Creates the event loop that every service runs on."""

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from math import ceil, isfinite
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")

COARSE_S = 0.002
"""Upper bound of the delay of libuv's clock.

It counts full milliseconds, possibly of a system clock that does so too.
"""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create a uvloop event loop with a precise clock, or asyncio's if uvloop is not installed.

    Its time has a resolution below a millisecond, and its timers never fire early.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()

    class PreciseLoop(uvloop.Loop):
        """uvloop with `time.monotonic` as its clock.

        uvloop's own clock counts whole milliseconds. Many engine steps take one or two, so step costs could
        not be measured with it. Timers still use libuv's clock, so their delays are rounded up to it.
        """

        def time(self) -> float:
            return time.monotonic()

        def call_at(
            self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
        ) -> asyncio.TimerHandle:
            now_s = time.monotonic()
            delay_s = when - now_s
            if delay_s > 0 and isfinite(delay_s):
                # The two clocks may have different origins: on macOS one continues during sleep.
                behind_s = min(max(now_s - super().time(), 0.0), COARSE_S)
                delay_s = ceil((delay_s + behind_s) * 1e3) / 1e3
            return super().call_later(delay_s, callback, *args, context=context)

        def call_later(
            self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
        ) -> asyncio.TimerHandle:
            return self.call_at(time.monotonic() + delay, callback, *args, context=context)

    return PreciseLoop()
