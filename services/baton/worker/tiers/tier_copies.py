"""Copies KV blocks between the device and the slots of the host tier, in a thread of their own."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from baton.transfer.backends.block_ranges import runs
from baton.transfer.backends.host_memory import Bytes


class TierCopies(Protocol):
    """Copies blocks between device and host. Each call blocks its thread until the copy is complete."""

    def to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy device blocks to slots, in the same order."""
        ...

    def to_device(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots to device blocks, in the same order."""
        ...

    def close(self) -> None:
        """Release what the copies need. Call it after the last copy and before the memory is freed."""
        ...


class CopyRunner(Protocol):
    """Runs copies, one after the other, outside the event loop."""

    async def run(self, copy: Callable[[], None], num_bytes: int) -> float:
        """Run a copy of `num_bytes` and return how many seconds it took. Raises what the copy raises."""
        ...

    def close(self) -> None:
        """Release the thread. Call it after the last copy."""
        ...


class CopyThread:
    """Implements `CopyRunner` with one thread, so that copies share neither a step's thread nor each other's
    bandwidth."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-tier")

    async def run(self, copy: Callable[[], None], num_bytes: int) -> float:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _timed, copy, loop.time)

    def close(self) -> None:
        self._thread.shutdown()


class HostCopies:
    """Implements `TierCopies` for device memory that is host memory: [num_blocks, block_bytes] uint8
    each."""

    def __init__(self, device: Bytes, host: Bytes) -> None:
        self._device, self._host = device, host

    def to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        _copy(self._device, block_ids, self._host, slots)

    def to_device(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        _copy(self._host, slots, self._device, block_ids)

    def close(self) -> None:
        """Drop the views, so that the memory can be freed."""
        self._device = self._host = np.empty((0, 0), dtype=np.uint8)


def _copy(source: Bytes, source_ids: Sequence[int], own: Bytes, own_ids: Sequence[int]) -> None:
    for run in runs(source_ids, own_ids):  # numpy releases the GIL during each copy
        np.copyto(own[run.own : run.own + run.num_blocks], source[run.source : run.source + run.num_blocks])


def _timed(copy: Callable[[], None], clock: Callable[[], float]) -> float:
    started_s = clock()
    copy()
    return clock() - started_s
