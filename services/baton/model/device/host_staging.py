"""Copies KV blocks between a device and a host buffer of equal size, which every transport can reach."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby

import numpy as np
import torch

from baton.model.device.kv_tensors import KvCache
from baton.runtime.logging import get_logger

log = get_logger(__name__)


class HostStaging:
    """Copies single blocks in either direction, on a GPU in a separate stream.

    A copy does not wait for running steps. Therefore no running step may read or write the blocks being
    copied.
    """

    def __init__(self, cache: KvCache, host: np.typing.NDArray[np.uint8]) -> None:
        """`host`: uint8 [num_blocks, block_bytes]; must stay allocated until `close`.

        Raises ValueError if the shape differs from that of the device's blocks.
        """
        self._device = cache.memory
        self._host = torch.from_numpy(host)
        if self._host.shape != self._device.shape:
            raise ValueError(
                f"the host buffer is {tuple(self._host.shape)} bytes; "
                f"must be {tuple(self._device.shape)} as the device's blocks"
            )
        self._stream = torch.cuda.Stream(cache.device) if cache.device.type == "cuda" else None
        self._is_pinned = self._stream is not None and _pin(self._host, cache.device)

    def close(self) -> None:
        """Undo the pinning of the host buffer. Call it after the last copy."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))

    def to_host(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the device to the same indices of the host buffer, and wait for it."""
        self._copy(self._device, self._host, block_ids)

    def to_device(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the host buffer to the same indices on the device, and wait for it."""
        self._copy(self._host, self._device, block_ids)

    def _copy(self, source: torch.Tensor, destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        if self._stream is None:
            for run in _runs(block_ids):
                destination[run].copy_(source[run])
            return
        with torch.cuda.stream(self._stream):
            for run in _runs(block_ids):
                destination[run].copy_(source[run], non_blocking=True)
        self._stream.synchronize()


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


def _runs(block_ids: Sequence[int]) -> Iterator[slice]:
    """Yield slices of consecutive block ids."""
    for _, group in groupby(enumerate(block_ids), key=lambda numbered: numbered[1] - numbered[0]):
        ids = [block_id for _, block_id in group]
        yield slice(ids[0], ids[-1] + 1)
