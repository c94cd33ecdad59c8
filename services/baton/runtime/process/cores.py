"""Determines which CPU cores this process may use, and its container's CPU quota."""

import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def pinnable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores this process may run on; empty if the system has no CPU affinity."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def num_usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(pinnable_cores()) or os.cpu_count() or 1


def core_quota(cgroup: Path = _CGROUP) -> float | None:
    """Return the CPU quota of this process's cgroup in cores, such as 1.5; None without a limit.

    A process with more busy threads than its quota is throttled for the rest of each period, in the middle of
    a step.
    """
    with suppress(OSError, ValueError):  # not cgroup version 2, or "max"
        limit, period = (cgroup / "cpu.max").read_text().split()
        return _quota(int(limit), int(period))
    with suppress(OSError, ValueError):
        limits = (cgroup / "cpu" / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return _quota(*(int(file.read_text()) for file in limits))
    return None


def _quota(limit_us: int, period_us: int) -> float | None:
    """Convert to cores. cgroup version 1 reports a limit of -1 if there is none."""
    return limit_us / period_us if limit_us > 0 and period_us > 0 else None
