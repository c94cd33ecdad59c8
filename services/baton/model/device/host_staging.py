"""A device's KV blocks, and as many in host memory, which transports reach everywhere."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby

import numpy as np
import torch

from baton.model.device.kv_tensors import KvCache
from baton.runtime.logging import get_logger

log = get_logger(__name__)


class HostStaging:
    """Copies single blocks in either direction. On a GPU in a stream of its own: neither waits for steps that
    are being computed, so blocks to copy must be ones that no such step writes or reads."""

    def __init__(self, cache: KvCache, host: np.typing.NDArray[np.uint8]) -> None:
        """`host`: [num_blocks, block_bytes], which the caller keeps until this is closed."""
        self._device = cache.blocks.view(cache.num_blocks, -1).view(torch.uint8)
        self._host = torch.from_numpy(host)
        if self._host.shape != self._device.shape:
            raise ValueError(
                f"{tuple(self._host.shape)} bytes of host memory for {tuple(self._device.shape)} of the device"
            )
        self._stream = torch.cuda.Stream(cache.device) if cache.device.type == "cuda" else None
        self._is_pinned = self._stream is not None and _pin(self._host, cache.device)

    def close(self) -> None:
        """Once nothing is copied any more: the host memory is then as it came."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))

    def to_host(self, block_ids: Sequence[int]) -> None:
        self._copy(self._device, self._host, block_ids)

    def to_device(self, block_ids: Sequence[int]) -> None:
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
    """Lets the GPU's copy engines read and write it by themselves; returns whether it is ours to undo. Else
    the driver copies through pages of its own, slower, so what the system refuses (a limit on locked memory)
    is no error."""
    if host.is_pinned():  # by a transport that knows the GPU
        return False
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    except RuntimeError as error:
        log.warning(
            "host_memory_not_pinned", problem=str(error), hint="KV goes through host memory slower; see `ulimit -l`"
        )
        with suppress(RuntimeError):  # the next launch is told of an error that is left, whoever left it
            torch.zeros(1, device=device)
        return False
    return True


def _runs(block_ids: Sequence[int]) -> Iterator[slice]:
    """Neighbours together."""
    for _, group in groupby(enumerate(block_ids), key=lambda numbered: numbered[1] - numbered[0]):
        ids = [block_id for _, block_id in group]
        yield slice(ids[0], ids[-1] + 1)
