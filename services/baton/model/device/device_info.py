"""Free memory and name of the device that a model runs on, for callers that must not import torch."""

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from baton.engine.kv_cache.sizing import free_host_bytes
from baton.runtime.memory.freed_memory import trim_heap


def has_gpu() -> bool:
    """Return True if torch can use a GPU."""
    return torch.cuda.is_available()


def gpu_name_and_uuid() -> tuple[str, str]:
    """Return the model name of this process's GPU, and its UUID as `nvidia-smi` writes it."""
    properties = torch.cuda.get_device_properties(0)
    return str(properties.name), f"GPU-{str(properties.uuid).removeprefix('GPU-')}"


def gpu_segments() -> Sequence[Mapping[str, Any]]:
    """Return the segments of torch's GPU allocator, see `torch.cuda.memory_snapshot`."""
    segments: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot()
    return segments


def free_bytes(device: torch.device, num_sharing: int = 1) -> int:
    """Return the bytes that this process can still allocate on `device`.

    num_sharing: number of processes that share a GPU. Each may use an equal part of it, in any order of
    start.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return gpu_share_bytes(int(free), int(total), torch.cuda.memory_reserved(device), num_sharing)
    return free_host_bytes()


def bind_thread(device: torch.device) -> None:
    """Make the calling thread use this GPU. UCX reaches the GPU memory of other processes only from such a
    thread."""
    torch.cuda.set_device(device)


def gpu_share_bytes(free: int, total: int, reserved: int, num_sharing: int) -> int:
    """Return the bytes that one of `num_sharing` processes can still allocate on a GPU.

    `free` and `total`: bytes of the GPU. `reserved`: bytes that this process has allocated.
    """
    return max(0, min(free, total // num_sharing - reserved))


def release_freed_memory() -> None:
    """Return memory that this process has freed, but its allocators still hold, to the GPU and the host.

    Host memory is released only with glibc.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU or the processor. Devices of one name are taken to be equally fast."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{platform.machine()} {platform.processor()}"
