"""The event loop that every service runs on."""

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from math import ceil, isfinite
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")

COARSE_S = 0.002
"""libuv's clock is behind ours by no more: it counts whole milliseconds, perhaps by a clock that does so,
too."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, else asyncio's. Its clock tells fractions of a millisecond, and no
    timer is early by it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()

    class PreciseLoop(uvloop.Loop):
        """uvloop's own clock counts whole milliseconds, and many steps of an engine take one or two: what
        they cost was learned from zeros, ones and twos. Its timers count by libuv's, so what is asked for by
        ours is rounded up to that."""

        def time(self) -> float:
            return time.monotonic()

        def call_at(
            self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
        ) -> asyncio.TimerHandle:
            now_s = time.monotonic()
            delay_s = when - now_s
            if delay_s > 0 and isfinite(delay_s):
                # The two need not count from the same moment: on a Mac one goes on while it sleeps.
                behind_s = min(max(now_s - super().time(), 0.0), COARSE_S)
                delay_s = ceil((delay_s + behind_s) * 1e3) / 1e3
            return super().call_later(delay_s, callback, *args, context=context)

        def call_later(
            self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
        ) -> asyncio.TimerHandle:
            return self.call_at(time.monotonic() + delay, callback, *args, context=context)

    return PreciseLoop()
