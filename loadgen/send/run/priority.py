"""Raises a process's scheduling priority, so that it is woken in time on a machine shared with the server."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
from enum import StrEnum
from pathlib import Path

SLICE_S = 0.0001
_NICE = -10
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call by machine; libc has no wrapper."""


class Priority(StrEnum):
    """Scheduling priorities, lowest first."""

    NORMAL = "normal"
    """Unchanged."""
    HIGH = "high"
    """Short time slices, which need no privilege (Linux 6.12) and wake a process sooner; niceness -10 if
    allowed."""
    REALTIME = "realtime"
    """Real-time scheduling (SCHED_RR) if allowed, otherwise as `high`."""


def raise_priority(wanted: Priority) -> str:
    """Raise this process's priority. Returns what was granted and what was not permitted, as text."""
    if wanted is Priority.NORMAL:
        return "normal"
    if wanted is Priority.REALTIME and _realtime():
        return "realtime"
    return granted_text(wanted, has_slice=_short_slice(), is_nice=_nice())


def granted_text(wanted: Priority, *, has_slice: bool, is_nice: bool) -> str:
    """Return a text such as `high (slice 0.1 ms, nice -10)` for a priority below real time."""
    granted = [f"slice {SLICE_S * 1e3:g} ms"] if has_slice else []
    granted += [f"nice {_NICE}"] if is_nice else []
    denied = ["realtime not permitted"] if wanted is Priority.REALTIME else []
    denied += [] if is_nice else ["nice not permitted"]
    return f"{'high' if granted else 'normal'} ({', '.join([*granted, *denied])})"


def _nice() -> bool:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        # With autogroups, niceness applies within a session. This process has its own session, so its
        # autogroup needs the niceness too.
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")
    return True


def _realtime() -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


def _short_slice() -> bool:
    """Set a short time slice. Returns True on success.

    The argument is struct sched_attr {size, policy, flags, nice, priority, runtime, deadline, period}. For a
    normal process, `runtime` is its slice.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    attributes = struct.pack(
        "IIQiIQQQ", 48, os.SCHED_OTHER, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, int(SLICE_S * 1e9), 0, 0
    )
    is_set: bool = ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
    return is_set
