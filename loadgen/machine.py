"""Facts about the machine that a run was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("uvloop", "httptools", "grpcio", "numpy")


def loadgen_version() -> str:
    """Return the version of the installed distribution, or "unknown"."""
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def facts() -> dict[str, Any]:
    """Return facts about this host for `run.json`.

    `cores` counts the cores that this process may use. `cpu_quota`, in cores, is a container's further limit.
    """
    return {
        "host": platform.node(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "cpu_quota": _cpu_quota(),
        "memory_bytes": _memory_bytes(),
        "load_before": load(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": {name: _version(name) for name in _PACKAGES},
        "clock": "perf_counter",
    }


def load() -> list[float] | None:
    """Return the load averages over 1, 5 and 15 minutes, or None if the system has none."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return None


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """Return the CPU's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Model", "CPU part")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _cpu_quota() -> float | None:
    """Return the CPU limit of this control group in cores, or None if there is none."""
    if sys.platform != "linux":
        return None
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
