"""Memory of the device that a model runs on."""

import ctypes
from contextlib import suppress

import torch

from baton.engine.kv_memory import free_host_bytes


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on `device`."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    return free_host_bytes()


def give_back_freed() -> None:
    """What this process has freed and its allocators keep goes back to the device, and to the host where the C library can be told to
    (glibc)."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
