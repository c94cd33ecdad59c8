"""A simulated host tier: copies between simulated memories take virtual time, outside of any process."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from baton.core.ids import WorkerRef
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_streams import NETWORK
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.tiers.host_tier import HostTier

COPY_BYTES_PER_S = 16e9
"""Speed of copies: about that of PCIe 4.0."""
REUSED = 7
"""Content of the tokens of a block that was reused under a read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTierMemory:
    """The slots of a simulated host tier and their generation table."""

    memory: SimMemory
    generations: MemoryGenerationTable

    @classmethod
    def of(cls, worker: WorkerRef, num_slots: int, block_size_tokens: int) -> "SimTierMemory":
        """Return the memory of a new incarnation of a worker."""
        return cls(
            memory=SimMemory(num_slots, block_size_tokens),
            generations=MemoryGenerationTable(bytearray(num_slots * ENTRY_BYTES), worker.worker_epoch),
        )

    def open(
        self,
        worker: WorkerRef,
        device: SimMemory,
        block_bytes: int,
        copy_bytes_per_s: float = COPY_BYTES_PER_S,
        copy_deviation: float = 0.0,
        is_reused: Callable[[], bool] = lambda: False,
    ) -> HostTier:
        """Return the tier of a worker whose blocks are in `device`.

        copy_deviation: see `SimCopyRunner`. is_reused: see `SimCopies`.
        """
        return HostTier(
            shares_cores=False,
            worker=worker,
            num_slots=self.memory.num_blocks,
            block_bytes=block_bytes,
            generations=self.generations,
            copies=SimCopies(device, self.memory, self.generations, is_reused),
            runner=SimCopyRunner(copy_bytes_per_s, copy_deviation),
        )


class SimCopies:
    """Implements `TierCopies` between two simulated memories."""

    def __init__(
        self, device: SimMemory, host: SimMemory, generations: MemoryGenerationTable, is_reused: Callable[[], bool]
    ) -> None:
        """`is_reused`: called for each slot that is copied to the device. If it returns True, the slot is
        reused under the copy, and filled again with the same content. Only its generation shows that the copy
        has other content."""
        self._device, self._host = device, host
        self._generations, self._is_reused = generations, is_reused

    def to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._host.write_block(slot, self._device.block(block_id))

    def to_device(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for slot, block_id in zip(slots, block_ids, strict=True):
            content = self._host.block(slot)
            if self._is_reused():
                block_hash = self._generations.entry(slot).block_hash
                self._generations.begin_generation(slot)
                self._generations.set_hash(slot, block_hash)
                content = (REUSED,) * len(content)
            self._device.write_block(block_id, content)

    def close(self) -> None:
        """Do nothing: the memories are Python objects."""


class SimCopyRunner:
    """Implements `CopyRunner`: one copy at a time.

    It goes on while the process of the worker is paused, as its device does.
    """

    def __init__(self, bytes_per_s: float = COPY_BYTES_PER_S, deviation: float = 0.0) -> None:
        """deviation: share by which the time of a copy is longer or shorter, at random and at most"""
        self._bytes_per_s, self._deviation, self._rng = bytes_per_s, deviation, Random(0)
        self._turn = asyncio.Lock()

    async def run(self, copy: Callable[[], None], num_bytes: int) -> float:
        async with self._turn:
            took_s = varied(num_bytes / self._bytes_per_s, self._deviation, self._rng)
            await asyncio.get_running_loop().create_task(_after(took_s, copy), context=NETWORK.copy())
            return took_s

    def close(self) -> None:
        """Do nothing: there is no thread."""


def varied(time_s: float, deviation: float, rng: Random) -> float:
    """Return a time that is longer or shorter at random, by at most this share."""
    return time_s * rng.uniform(1 - deviation, 1 + deviation) if deviation else time_s


async def _after(delay_s: float, copy: Callable[[], None]) -> None:
    await asyncio.sleep(delay_s)
    copy()
