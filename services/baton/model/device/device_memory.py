"""Memory of the device that a model runs on."""

import ctypes
from contextlib import suppress

import torch

from baton.engine.kv_cache.sizing import free_host_bytes


def free_bytes(device: torch.device, num_sharing: int = 1) -> int:
    """Memory that this process can still take on `device`: of a GPU that `num_sharing` share, what is left of
    its own part, whoever of them came first."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, min(int(free), int(total) // num_sharing - torch.cuda.memory_reserved(device)))
    return free_host_bytes()


def give_back_freed() -> None:
    """What this process has freed and its allocators keep goes back to the device, and to the host where the
    C library can be told to (glibc)."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
