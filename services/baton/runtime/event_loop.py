"""The event loop that every process of ours runs on."""

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from math import ceil
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, else asyncio's. Its clock tells fractions of a millisecond, and no timer is early by it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()

    class PreciseLoop(uvloop.Loop):
        """uvloop's own clock counts whole milliseconds, and many steps of an engine take one or two: what they cost was learned from
        zeros, ones and twos. Its timers count from that clock, too, so what is asked for by ours is rounded up to it."""

        def time(self) -> float:
            return time.monotonic()  # libuv's clock, not rounded

        def call_at(
            self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
        ) -> asyncio.TimerHandle:
            return super().call_later(ceil((when - super().time()) * 1e3) / 1e3, callback, *args, context=context)

        def call_later(
            self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
        ) -> asyncio.TimerHandle:
            return self.call_at(time.monotonic() + delay, callback, *args, context=context)

    return PreciseLoop()
