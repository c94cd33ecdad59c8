"""Copies KV blocks between a device and host memory: a staging buffer of equal size, or slots of a tier."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from baton.model.device.kv_tensors import KvCache
from baton.runtime.logging import get_logger
from baton.transfer.backends.block_ranges import runs

log = get_logger(__name__)


class DeviceCopies:
    """Copies blocks in either direction, on a GPU in a separate stream.

    A copy does not wait for running steps. Therefore no running step may read or write the blocks being
    copied.
    """

    def __init__(
        self, cache: KvCache, host: np.typing.NDArray[np.uint8], *, max_pinned_bytes: float = float("inf")
    ) -> None:
        """`host`: uint8 [num_slots, block_bytes]; must stay allocated until `close`.

        max_pinned_bytes: a larger buffer is not pinned, because that takes long and needs all of its pages.
        Raises ValueError if the size of a block differs from that of the device's blocks.
        """
        self._device = cache.memory
        self._host = torch.from_numpy(host)
        if self._host.shape[1] != self._device.shape[1]:
            raise ValueError(
                f"the host buffer has blocks of {self._host.shape[1]} bytes; must be {self._device.shape[1]} as the "
                "device's blocks"
            )
        self._stream = torch.cuda.Stream(cache.device) if cache.device.type == "cuda" else None
        may_pin = self._stream is not None and self._host.nbytes <= max_pinned_bytes
        self._is_pinned = may_pin and _pin(self._host, cache.device)

    def close(self) -> None:
        """Undo the pinning of the host buffer. Call it after the last copy."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))

    def to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy device blocks to slots of the host buffer, in the same order, and wait for it."""
        self._copy(self._device, block_ids, self._host, slots)

    def to_device(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots of the host buffer to device blocks, in the same order, and wait for it."""
        self._copy(self._host, slots, self._device, block_ids)

    def _copy(self, source: torch.Tensor, source_ids: Sequence[int], own: torch.Tensor, own_ids: Sequence[int]) -> None:
        ranges = [
            (slice(run.source, run.source + run.num_blocks), slice(run.own, run.own + run.num_blocks))
            for run in runs(source_ids, own_ids)
        ]
        if self._stream is None:
            for read, write in ranges:
                own[write].copy_(source[read])
            return
        with torch.cuda.stream(self._stream):
            for read, write in ranges:
                own[write].copy_(source[read], non_blocking=True)
        self._stream.synchronize()


class HostStaging:
    """Copies single blocks between a device and a host buffer, which every transport can reach, under the
    same ids."""

    def __init__(self, cache: KvCache, host: np.typing.NDArray[np.uint8]) -> None:
        """`host`: as of `DeviceCopies`, with as many blocks as the device. Raises ValueError otherwise."""
        if host.shape != tuple(cache.memory.shape):
            raise ValueError(
                f"the host buffer is {host.shape} bytes; must be {tuple(cache.memory.shape)} as the device's blocks"
            )
        self._copies = DeviceCopies(cache, host)

    def close(self) -> None:
        """Undo the pinning of the host buffer. Call it after the last copy."""
        self._copies.close()

    def to_host(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the device to the same indices of the host buffer, and wait for it."""
        self._copies.to_host(block_ids, block_ids)

    def to_device(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the host buffer to the same indices on the device, and wait for it."""
        self._copies.to_device(block_ids, block_ids)


def _pin(host: torch.Tensor, device: torch.device) -> bool:
    """Register the host buffer with CUDA for faster copies. Return True if this call did it.

    The system may refuse, for example because of the limit on locked memory. Copies then go through the
    driver's own buffers, slower, so this is logged and not an error.
    """
    if host.is_pinned():  # pinned by a transport that supports the GPU
        return False
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    except RuntimeError as error:
        log.warning("host_memory_not_pinned", problem=str(error), hint="KV copies are slower; raise `ulimit -l`")
        with suppress(RuntimeError):  # clears the pending CUDA error, which the next launch would report
            torch.zeros(1, device=device)
        return False
    return True
