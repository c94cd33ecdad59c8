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
    """Raise this process's priority. Returns what was granted, as text."""
    if wanted is Priority.NORMAL:
        return "normal"
    if wanted is Priority.REALTIME and _realtime():
        return "realtime"
    granted = [f"slice {SLICE_S * 1e3:g} ms"] if _short_slice() else []
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        granted.append(f"nice {_NICE}")
        # With autogroups, niceness applies within a session. This process has its own session, so its
        # autogroup needs the niceness too.
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")
    return ", ".join(granted) or "normal"


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
