"""Wakes the event loop at a point in time, accurate to a fraction of a millisecond and without spinning.

Timers of event loops have millisecond resolution (uvloop, epoll), half of the send lag that a run is allowed.
Linux has timer file descriptors, which wake the loop like a socket, with nanosecond resolution. On other
systems the alarm sleeps until shortly before the time and then polls: at 250 alarms a second polling takes 20
% of a core, timerfd 2 %.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Protocol

now_s = time.perf_counter
"""Clock of all of loadgen: monotonic, and the same in all processes of a machine."""

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_EARLY_S = 0.002
"""Polling of `LoopAlarm` begins this long before the set time."""


class Alarm(Protocol):
    """Calls its callback once at the set time. Setting a new time replaces the previous one."""

    def set(self, at_s: float) -> None:
        """Set the time, in `now_s()` time. A time in the past fires immediately."""

    def close(self) -> None:
        """Cancel the alarm and release its resources."""


class DueCheck:
    """The time of the next due request, checked in between received messages.

    If many messages arrive together, the event loop would run the alarm only after all of them. So message
    handlers check it themselves: `if now_s >= due_check.at_s: due_check.fire()`.
    """

    __slots__ = ("at_s", "fire")

    def __init__(self) -> None:
        self.at_s = math.inf
        self.fire: Callable[[], None] = lambda: None


def new_alarm(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Alarm:
    """Return the most precise alarm that this machine supports."""
    if sys.platform == "linux":
        try:
            return FdAlarm(loop, callback)
        except (OSError, AttributeError):  # a kernel or a libc without it, or no more file descriptors
            pass
    return LoopAlarm(loop, callback)


class FdAlarm:
    """Alarm on a Linux timerfd, through libc because Python has it only from 3.13 on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.timerfd_settime.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop = loop
        self._callback = callback
        # perf_counter may have another origin than CLOCK_MONOTONIC, but both run at the same rate.
        self._offset_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - time.perf_counter_ns()
        loop.add_reader(self._fd, self._fired)

    def set(self, at_s: float) -> None:
        at_ns = max(1, int(at_s * 1e9) + self._offset_ns)  # zero would disarm it
        spec = struct.pack("qqqq", 0, 0, at_ns // 1_000_000_000, at_ns % 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, spec, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # it was set again after it fired
            return
        self._callback()


class LoopAlarm:
    """Alarm on the event loop's timer, with polling for the last milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._at_s = 0.0
        self._handle: asyncio.Handle | None = None

    def set(self, at_s: float) -> None:
        self.close()
        self._at_s = at_s
        self._wait()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wait(self) -> None:
        left_s = self._at_s - now_s()
        if left_s > _EARLY_S:
            self._handle = self._loop.call_later(left_s - _EARLY_S, self._wait)
        elif left_s > 0:
            self._handle = self._loop.call_soon(self._wait)
        else:
            self._handle = self._loop.call_soon(self._fire)

    def _fire(self) -> None:
        self._handle = None
        self._callback()
