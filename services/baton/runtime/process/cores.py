"""Which cores this process may use, and how much of them the limit of its container leaves."""

import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def pinnable_cores() -> tuple[int, ...]:
    """Those that it may run on, by number; none where the system pins nobody."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def num_usable_cores() -> int:
    return len(pinnable_cores()) or os.cpu_count() or 1


def core_quota(cgroup: Path = _CGROUP) -> float | None:
    """Cores' worth of time that this process's cgroup may take, such as 1.5; None where nothing limits it.
    Whoever computes in more threads is stopped with all of them for the rest of each period, in the middle of
    a step."""
    with suppress(OSError, ValueError):  # not of version 2, or "max"
        limit, period = (cgroup / "cpu.max").read_text().split()
        return _share(int(limit), int(period))
    with suppress(OSError, ValueError):
        limits = (cgroup / "cpu" / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        return _share(*(int(file.read_text()) for file in limits))
    return None


def _share(limit_us: int, period_us: int) -> float | None:
    """Version 1 has a limit of -1 where there is none."""
    return limit_us / period_us if limit_us > 0 and period_us > 0 else None
