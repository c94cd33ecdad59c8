"""Checks of the hardware, and of what the operating system lets us have of it."""

import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from baton.engine.kv_cache.sizing import left_in_cgroup_bytes
from baton.fleet.doctor.doctor_check import Finding, ok, warn
from baton.fleet.doctor.doctor_software import cuda_of_pytorch
from baton.runtime.process.cores import core_quota, num_usable_cores

CPUINFO = Path("/proc/cpuinfo")
SHM = Path("/dev/shm")
LEAST_MEMORY_BYTES = 4 * 2**30
LEAST_SHM_BYTES = 256 * 2**20
"""Ray's object store takes 80 MiB of it, and UCX its queues; a container's default of 64 MiB is too
little."""
LEAST_OPEN_FILES = 4096
TOOL_LIMIT_S = 10.0
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")
"""x86's two, and the one of aarch64."""


def cpu() -> Iterator[Finding]:
    """Whether the processor multiplies bfloat16, or floats in its place."""
    yield cpu_finding(platform.machine(), CPUINFO.read_text() if CPUINFO.exists() else "")


def cpu_finding(machine: str, cpuinfo: str) -> Finding:
    """`cpuinfo`: the text of /proc/cpuinfo; empty where there is none."""
    fields = dict(line.partition(":")[::2] for line in cpuinfo.split("\n\n")[0].splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    model = facts.get("model name") or platform.processor() or "unknown model"
    if not flags:
        return ok("cpu", f"{machine}, {model}; its features are not known here")
    have = [name for name in BF16_FEATURES if name in flags]
    if have:
        return ok(
            "cpu",
            f"{machine}, {model}, {' and '.join(have)}"
            + ("" if "amx_bf16" in have or machine != "x86_64" else ", no AMX"),
        )
    hint = "floats are multiplied instead, several times slower; models that our decoder does not know may be faster with --dtype float32"
    return warn("cpu", f"{machine}, {model}, no bfloat16 instructions", hint)


def cores() -> Iterator[Finding]:
    """How many cores this process may use."""
    yield cores_finding(num_usable_cores(), core_quota())


def cores_finding(usable: int, quota: float | None) -> Finding:
    """`quota`: cores' worth of time that a container's limit leaves."""
    share = float(usable) if quota is None else quota
    found = f"{usable} core{'' if usable == 1 else 's'}" + (
        f", of which a quota allows {share:.3g}" if share < usable else ""
    )
    if min(share, usable) < 2:
        return warn(
            "cores",
            found,
            "the workers take turns; give two cores or more, or start one worker: --prefill 0 --decode 0 --hybrid 1",
        )
    return ok("cores", found)


def memory() -> Iterator[Finding]:
    """What is free now, and what a container's limit leaves of that."""
    virtual = psutil.virtual_memory()
    yield memory_finding(virtual.total, virtual.available, left_in_cgroup_bytes())


def memory_finding(total: int, available: int, left: int | None) -> Finding:
    found = f"{available / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    if left is not None and left < available:
        found += f", of which the container's limit leaves {left / 2**30:.1f} GiB"
        available = left
    if available < LEAST_MEMORY_BYTES:
        return warn(
            "memory",
            found,
            "each worker takes most of a GiB beside its model and KV; close other programs, or start fewer workers",
        )
    return ok("memory", found)


def shared_memory() -> Iterator[Finding]:
    """Nothing where the system has no /dev/shm."""
    if SHM.exists():
        usage = shutil.disk_usage(SHM)
        yield shm_finding(usage.total, usage.free)


def shm_finding(total: int, free: int) -> Finding:
    found = f"{free / 2**20:,.0f} MiB free of {total / 2**20:,.0f} MiB"
    if free < LEAST_SHM_BYTES:
        return warn("/dev/shm", found, "Ray and UCX need it; free some, or start the container with --shm-size=1g")
    return ok("/dev/shm", found)


def open_files() -> Iterator[Finding]:
    yield open_files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))


def open_files_finding(soft: int, hard: int) -> Finding:
    shown = {resource.RLIM_INFINITY: "unlimited"}
    found = (
        f"{shown.get(soft, soft)}, may be raised to {shown.get(hard, hard)}"
        if soft != hard
        else f"{shown.get(soft, soft)}"
    )
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        return warn(
            "open files",
            found,
            f"each client takes one; raise the limit in the shell that starts Baton: ulimit -n {LEAST_OPEN_FILES * 4}",
        )
    return ok("open files", found)


def gpu() -> Iterator[Finding]:
    """NVIDIA's tool is asked, and whether our PyTorch could use what it finds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield ok(
            "gpu",
            "none found; models run on the CPU"
            if sys.platform != "darwin"
            else "not used on macOS; models run on the CPU",
        )
        return
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=TOOL_LIMIT_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        yield warn("gpu", f"nvidia-smi does not work: {error}", "repair the driver, or go on with --device cpu")
        return
    yield gpu_finding(done.stdout, cuda_of_pytorch())


def gpu_finding(listed: str, cuda: str | None) -> Finding:
    """`listed`: a line a GPU. `cuda`: the CUDA that PyTorch was built for."""
    names = [line.strip() for line in listed.splitlines() if line.strip()]
    if not names:
        return ok("gpu", "none found; models run on the CPU")
    found = "; ".join(names)
    if cuda is None:
        return warn(
            "gpu", f"{found}, but PyTorch here is built for the CPU only", "install a CUDA build of torch to use it"
        )
    return ok("gpu", found)
