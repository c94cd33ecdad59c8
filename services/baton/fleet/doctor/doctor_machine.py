"""Checks of the hardware, and of the limits that the operating system or container sets."""

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
MIN_MEMORY_BYTES = 4 * 2**30
MIN_SHM_BYTES = 256 * 2**20
"""Minimum free size of /dev/shm. Ray's object store takes 80 MiB, and UCX needs space for its queues. The
container default of 64 MiB is too small."""
MIN_OPEN_FILES = 4096
TOOL_TIMEOUT_S = 10.0
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")
"""CPU flags for bfloat16 arithmetic: two of x86, one of aarch64."""


def cpu() -> Iterator[Finding]:
    """Check whether the processor has bfloat16 instructions."""
    yield cpu_finding(platform.machine(), CPUINFO.read_text() if CPUINFO.exists() else "")


def cpu_finding(machine: str, cpuinfo: str) -> Finding:
    """Return the finding about the CPU.

    `cpuinfo`: the text of /proc/cpuinfo, empty if the file does not exist.
    """
    fields = dict(line.partition(":")[::2] for line in cpuinfo.split("\n\n")[0].splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    model = facts.get("model name") or platform.processor() or "unknown model"
    if not flags:
        return ok("cpu", f"{machine}, {model}; CPU flags unknown on this system")
    have = [name for name in BF16_FEATURES if name in flags]
    if have:
        return ok(
            "cpu",
            f"{machine}, {model}, {' and '.join(have)}"
            + ("" if "amx_bf16" in have or machine != "x86_64" else ", no AMX"),
        )
    advice = (
        "the model computes in float32 instead, several times more slowly; "
        "models that the native decoder does not support may be faster with --dtype float32"
    )
    return warn("cpu", f"{machine}, {model}, no bfloat16 instructions", advice)


def cores() -> Iterator[Finding]:
    """Check how many CPU cores this process may use."""
    yield cores_finding(num_usable_cores(), core_quota())


def cores_finding(usable: int, quota: float | None) -> Finding:
    """Return the finding about cores.

    `quota`: CPU quota of the container, in cores; None if there is none.
    """
    allowed = float(usable) if quota is None else quota
    found = f"{usable} core{'' if usable == 1 else 's'}" + (
        f", but the CPU quota allows {allowed:.3g}" if allowed < usable else ""
    )
    if min(allowed, usable) < 2:
        return warn(
            "cores",
            found,
            "workers share one core; provide two cores or more, or start one worker: --prefill 0 --decode 0 --hybrid 1",
        )
    return ok("cores", found)


def memory() -> Iterator[Finding]:
    """Check the free memory, within the limit of the container."""
    virtual = psutil.virtual_memory()
    yield memory_finding(virtual.total, virtual.available, left_in_cgroup_bytes())


def memory_finding(total: int, available: int, left: int | None) -> Finding:
    """Return the finding about memory, all in bytes.

    `left`: what the container's limit leaves; None if no limit.
    """
    found = f"{available / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    if left is not None and left < available:
        found += f", but the container's limit leaves {left / 2**30:.1f} GiB"
        available = left
    if available < MIN_MEMORY_BYTES:
        return warn(
            "memory",
            found,
            "each worker needs almost 1 GiB besides its model and KV cache; close programs, or start fewer workers",
        )
    return ok("memory", found)


def shared_memory() -> Iterator[Finding]:
    """Check the free size of /dev/shm, if the system has it."""
    if SHM.exists():
        usage = shutil.disk_usage(SHM)
        yield shm_finding(usage.total, usage.free)


def shm_finding(total: int, free: int) -> Finding:
    """Return the finding about /dev/shm. Both sizes are in bytes."""
    found = f"{free / 2**20:,.0f} MiB free of {total / 2**20:,.0f} MiB"
    if free < MIN_SHM_BYTES:
        return warn(
            "/dev/shm", found, "Ray and UCX need more; free some space, or start the container with --shm-size=1g"
        )
    return ok("/dev/shm", found)


def open_files() -> Iterator[Finding]:
    """Check the limit of open files of this process."""
    yield open_files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))


def open_files_finding(soft: int, hard: int) -> Finding:
    """Return the finding about open files. `soft` and `hard`: the limits as `getrlimit` returns them."""
    names = {resource.RLIM_INFINITY: "unlimited"}
    found = str(names.get(soft, soft)) + (f", can be raised to {names.get(hard, hard)}" if soft != hard else "")
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return warn(
            "open files",
            found,
            f"each client takes one; raise the limit in the shell that starts Baton: ulimit -n {MIN_OPEN_FILES * 4}",
        )
    return ok("open files", found)


def gpu() -> Iterator[Finding]:
    """Check which GPUs `nvidia-smi` lists, and whether the installed PyTorch can use them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        absent = "none found" if sys.platform != "darwin" else "not used on macOS"
        yield ok("gpu", f"{absent}; models run on the CPU")
        return
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        yield warn("gpu", f"nvidia-smi does not work: {error}", "repair the driver, or use --device cpu")
        return
    yield gpu_finding(done.stdout, cuda_of_pytorch())


def gpu_finding(listed: str, cuda: str | None) -> Finding:
    """Return the finding about GPUs.

    `listed`: one line per GPU. `cuda`: the CUDA version of PyTorch, or None.
    """
    names = [line.strip() for line in listed.splitlines() if line.strip()]
    if not names:
        return ok("gpu", "none found; models run on the CPU")
    found = "; ".join(names)
    if cuda is None:
        return warn(
            "gpu",
            f"{found}, but the installed PyTorch supports only the CPU",
            "install a CUDA build of torch to use it",
        )
    return ok("gpu", found)
