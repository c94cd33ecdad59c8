"""A simulated disk: a file of KV blocks that outlives its process. Reads and writes take virtual time."""

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.engine.tiers.kv_tier import BlockToStore
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_streams import NETWORK
from baton.sim.sim_tier import SimCopies, SimCopyRunner
from baton.worker.disk.disk_format import DiskDefect, SlotHeader, SlotState
from baton.worker.disk.disk_runner import NUM_READERS
from baton.worker.tiers.disk_tier import DiskTier

ResultT = TypeVar("ResultT")

READ_LATENCY_S = 0.0001
"""Time until a disk begins to answer: about that of an NVMe disk."""
DISK_BYTES_PER_S = 3e9
STAGING_ROWS = 32


class SimDisk:
    """The disk of one worker, with the slots of its file. Implements `BlockStore` for one process at a time.

    is_full: writes fail. latency_s: of a read
    """

    def __init__(self, num_slots: int, block_size_tokens: int) -> None:
        self.num_slots = num_slots
        self.held: list[SlotHeader] = []
        self.defects: Counter[DiskDefect] = Counter()
        self.is_full = False
        self.latency_s = READ_LATENCY_S
        self._staging = SimMemory(STAGING_ROWS, block_size_tokens)
        self._sequences = [0] * num_slots
        self._headers: dict[int, SlotHeader] = {}
        self._contents: dict[int, tuple[int, ...]] = {}
        self._written: dict[int, tuple[int, ...]] = {}  # what a checksum is compared with

    def open(self, worker: WorkerRef, device: SimMemory, block_bytes: int) -> DiskTier:
        """Return the tier of a new incarnation of a worker whose blocks are in `device`."""
        valid = (header for header in self._headers.values() if header.state is SlotState.VALID)
        self.held = sorted(valid, key=lambda header: header.sequence)
        self.defects = Counter()
        return DiskTier(
            worker=worker,
            store=self,
            block_bytes=block_bytes,
            num_rows=STAGING_ROWS,
            copies=SimCopies(device, self._staging),
            copy_runner=SimCopyRunner(),
            disk_runner=_SimDiskRunner(self),
        )

    def corrupt(self, slot: int) -> bool:
        """Change the content of a slot. Returns False if it has none."""
        if slot in self._contents:
            self._contents[slot] = tuple(each + 1 for each in self._contents[slot])
        return slot in self._contents

    # -- BlockStore ------------------------------------------------------------------------------------------------

    def sequence(self, slot: int) -> int:
        return self._sequences[slot]

    def probe(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Do nothing: the runner takes the time."""

    def write(self, blocks: Mapping[int, BlockToStore], rows: Sequence[int]) -> None:
        if self.is_full:
            self.defects[DiskDefect.NO_SPACE] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        last = max(self._sequences, default=0)
        for number, ((slot, block), row) in enumerate(zip(blocks.items(), rows, strict=True), last + 1):
            self._sequences[slot] = number
            self._contents[slot] = self._written[slot] = self._staging.block(row)
            self._headers[slot] = SlotHeader(
                slot=slot,
                state=SlotState.VALID,
                sequence=number,
                block_hash=block.block_hash,
                tenant_root=block.tenant_root,
                is_announced=block.is_announced,
                is_reused=block.is_reused,
            )

    def read(self, hashes: Mapping[int, BlockHash], rows: Sequence[int]) -> list[DiskDefect | None]:
        for slot, row in zip(hashes, rows, strict=True):
            self._staging.write_block(row, self._contents[slot])
        return [None if self._contents[slot] == self._written[slot] else DiskDefect.DAMAGED_PAYLOAD for slot in hashes]

    def drop(self, sequences: Mapping[int, int]) -> None:
        for slot, sequence in sequences.items():
            if self._sequences[slot] == sequence and slot in self._headers:
                self._headers[slot] = self._headers[slot]._replace(state=SlotState.DISCARDED)

    def erase(self, tenant_root: BlockHash) -> int:
        erased = [s for s, header in self._headers.items() if header.tenant_root in (tenant_root, NO_HASH)]
        for slot in erased:
            del self._headers[slot], self._contents[slot], self._written[slot]
        return len(erased)

    def close(self) -> None:
        """Do nothing: the content stays."""


class _SimDiskRunner:
    """Implements `DiskRunner` in virtual time. It goes on while the process of the worker is paused."""

    writes_busy_s = 0.0

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self._readers, self._writer = asyncio.Semaphore(NUM_READERS), asyncio.Lock()

    async def read(self, job: Callable[[], ResultT], num_bytes: int) -> ResultT:
        async with self._readers:
            return await _after(self._disk.latency_s + num_bytes * NUM_READERS / DISK_BYTES_PER_S, job)

    async def write(self, job: Callable[[], ResultT], num_bytes: int) -> ResultT:
        async with self._writer:
            return await _after(READ_LATENCY_S + num_bytes / DISK_BYTES_PER_S, job)

    def close(self) -> None:
        """Do nothing: there are no threads."""


async def _after(delay_s: float, job: Callable[[], ResultT]) -> ResultT:
    async def run() -> ResultT:
        await asyncio.sleep(delay_s)
        return job()

    return await asyncio.get_running_loop().create_task(run(), context=NETWORK.copy())
