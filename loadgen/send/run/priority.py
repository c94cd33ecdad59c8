"""Being woken in time on a machine that others use, too; most of all the server, where it shares the
cores."""

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
"""The system call's number by machine; libc has no function for it."""


class Priority(StrEnum):
    NORMAL = "normal"
    """As started."""
    HIGH = "high"
    """Short time slices, which anybody may ask for (Linux 6.12): who takes little at a time is woken sooner.
    And niceness -10, where the system lets this user have it."""
    REALTIME = "realtime"
    """Before everything else (SCHED_RR), where the system lets this user have it; else as `high`."""


def raise_priority(wanted: Priority) -> str:
    """Of this process; what it got, in words."""
    if wanted is Priority.NORMAL:
        return "normal"
    if wanted is Priority.REALTIME and _realtime():
        return "realtime"
    got = [f"slice {SLICE_S * 1e3:g} ms"] if _short_slice() else []
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        got.append(f"nice {_NICE}")
        # Sessions share a machine as wholes where autogroups are on; ours has a session of its own.
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")
    return ", ".join(got) or "normal"


def _realtime() -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


def _short_slice() -> bool:
    """struct sched_attr {size, policy, flags, nice, priority, runtime, deadline, period}; for a normal
    process, `runtime` is its slice."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    attributes = struct.pack(
        "IIQiIQQQ", 48, os.SCHED_OTHER, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, int(SLICE_S * 1e9), 0, 0
    )
    is_set: bool = ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
    return is_set
