"""A simulated disk: a file of KV blocks that outlives its process. Reads and writes take virtual time.

The file has the real format, and `BlockFile` reads and writes it. Each read is compared with what the faults
of the disk have changed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import TypeVar

import numpy as np

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.sim.sim_file import OpenSimFile, SimFile
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_streams import NETWORK
from baton.sim.sim_tier import SimCopyRunner, varied
from baton.transfer.backends.host_memory import Bytes
from baton.worker.disk.block_file import BlockFile
from baton.worker.disk.disk_format import PAGE_BYTES, DiskDefect, FileShape, encode_superblock, read_superblock
from baton.worker.disk.disk_runner import NUM_READERS
from baton.worker.tiers.disk_tier import DiskTier

ResultT = TypeVar("ResultT")

READ_LATENCY_S = 0.0001
"""Time until a disk begins to answer: about that of an NVMe disk."""
DISK_BYTES_PER_S = 3e9
STAGING_ROWS = 32
SLOT_BYTES = 8
"""Bytes of a token's KV in the file: those of the number that stands for it."""


class SimDisk:
    """The disk of one worker, used by one process at a time.

    latency_s: of a read
    bytes_per_s: of all reads together, and of writes
    write_begun: set when a write begins
    """

    def __init__(
        self,
        num_slots: int,
        block_size_tokens: int,
        seed: int = 0,
        bytes_per_s: float = DISK_BYTES_PER_S,
        deviation: float = 0.0,
    ) -> None:
        """deviation: share by which a read or write takes longer or shorter, at random and at most"""
        shape = FileShape(
            num_slots=num_slots,
            block_bytes=SLOT_BYTES * block_size_tokens,
            layout=b"simulated layout",
            model=b"simulated model.",
        )
        self.file = SimFile(shape)
        self.latency_s, self.bytes_per_s, self.deviation = READ_LATENCY_S, bytes_per_s, deviation
        self.write_begun = asyncio.Event()
        self.store: AuditedBlockFile | None = None
        self._rng = Random(seed)
        self._runner: _SimDiskRunner | None = None

    def open(self, worker: WorkerRef, device: SimMemory, block_bytes: int) -> DiskTier:
        """Return the tier of a new incarnation of a worker whose blocks are in `device`."""
        self.kill()
        defects, shape = self._prepared(), self.file.shape
        file_id, defect = read_superblock(bytes(self.file.content[:PAGE_BYTES]), shape)
        if defect is not None:
            defects[defect] += bool(self.file.content)
            self.file.clear()
            file_id = self._rng.getrandbits(64)
            self.file.content += encode_superblock(shape, file_id)
            self.file.extend()
        staging: Bytes = np.zeros((STAGING_ROWS, shape.block_bytes), dtype=np.uint8)
        opened = OpenSimFile(self.file)
        self.store = AuditedBlockFile(self.file, opened, file_id, staging)
        self.store.defects += defects
        self._runner = _SimDiskRunner(self, opened)
        return DiskTier(
            shares_cores=False,
            worker=worker,
            store=self.store,
            block_bytes=block_bytes,
            num_rows=STAGING_ROWS,
            copies=_StagingCopies(device, staging),
            copy_runner=SimCopyRunner(),
            disk_runner=self._runner,
        )

    def kill(self) -> None:
        """End the process that has the file open. A write that is under way stops at a random byte."""
        if self._runner is not None:
            self._runner.kill(self._rng)
            self._runner = None

    def corrupt(self, slot: int) -> bool:
        """Change the content of a slot. Returns False if it has none."""
        offset = self.file.shape.payload_offset(slot)
        self.file.content[offset] ^= 1
        return any(self.file.content[offset : offset + self.file.shape.block_bytes])

    def payload(self, slot: int) -> tuple[int, ...]:
        """Return the content of a slot as it is in the file."""
        offset = self.file.shape.payload_offset(slot)
        content = bytes(self.file.content[offset : offset + self.file.shape.block_bytes])
        return tuple(np.frombuffer(content, dtype=np.uint64).tolist())

    def _prepared(self) -> "Counter[DiskDefect]":
        """Give a file that was truncated its size back."""
        defects: Counter[DiskDefect] = Counter()
        if PAGE_BYTES <= len(self.file.content) < self.file.shape.file_bytes:
            defects[DiskDefect.TRUNCATED] += 1
            self.file.extend()
        return defects


class AuditedBlockFile(BlockFile):
    """A `BlockFile` that records what it found in damaged slots.

    found: (slot, sequence) of damaged content whose damage was found by a load
    problems: content that was damaged and returned, or was not and was refused, or defects that were not
        counted
    """

    def __init__(self, file: SimFile, opened: OpenSimFile, file_id: int, staging: Bytes) -> None:
        self.found: set[tuple[int, int]] = set()
        self.problems: list[str] = []
        self._sim_file = file
        self._num_refused_before = file.num_refused
        super().__init__(opened, file.shape, file_id, staging)
        num_damaged, num_found = file.num_damaged_headers(), self.defects[DiskDefect.DAMAGED_HEADER]
        if num_damaged > num_found:
            self.problems.append(f"{num_damaged} headers are damaged, {num_found} were found")

    def read(self, hashes: Mapping[int, BlockHash], rows: Sequence[int]) -> list[DiskDefect | None]:
        defects = super().read(hashes, rows)
        for slot, defect in zip(hashes, defects, strict=True):
            is_damaged = self._sim_file.has_damaged_payload(slot)
            if is_damaged is (defect is None):
                self.problems.append(f"slot {slot} is {'' if is_damaged else 'not '}damaged, but found was {defect}")
            if defect is not None:
                self.found.add((slot, self.sequence(slot)))
        return defects

    def check(self) -> None:
        """Raise AssertionError if a defect was not found, or was not counted once."""
        problems = list(self.problems)
        num_counted = self.defects[DiskDefect.DAMAGED_PAYLOAD] + self.defects[DiskDefect.TRUNCATED]
        if num_counted < len(self.found):
            problems.append(f"{len(self.found)} damaged payloads were found, and {num_counted} counted")
        if self._sim_file.num_refused > self._num_refused_before and not self.defects[DiskDefect.NO_SPACE]:
            problems.append("writes to a full disk were not counted")
        if problems:
            raise AssertionError("; ".join(problems[:3]))


class _StagingCopies:
    """Implements `TierCopies` between a simulated memory and rows of bytes."""

    def __init__(self, device: SimMemory, staging: Bytes) -> None:
        self._device, self._staging = device, staging.view(np.uint64)

    def to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for block_id, row in zip(block_ids, slots, strict=True):
            self._staging[row] = self._device.block(block_id)

    def to_device(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for row, block_id in zip(slots, block_ids, strict=True):
            self._device.write_block(block_id, self._staging[row].tolist())

    def close(self) -> None:
        """Do nothing: the memories are Python objects."""


class _SimDiskRunner:
    """Implements `DiskRunner` in virtual time. It goes on while the process of the worker is paused."""

    writes_busy_s = 0.0

    def __init__(self, disk: SimDisk, file: OpenSimFile) -> None:
        self._disk, self._file = disk, file
        self._readers, self._writer = asyncio.Semaphore(NUM_READERS), asyncio.Lock()
        self._writing: Callable[[], object] | None = None
        self._rng = Random(0)

    async def read(self, job: Callable[[], ResultT], num_bytes: int) -> ResultT:
        async with self._readers:
            return await _after(self._disk.latency_s + self._bytes_s(num_bytes * NUM_READERS), job)

    async def write(self, job: Callable[[], ResultT], num_bytes: int) -> ResultT:
        async with self._writer:
            self._writing = job
            if num_bytes:
                self._disk.write_begun.set()
            try:
                return await _after(READ_LATENCY_S + self._bytes_s(num_bytes), job)
            finally:
                self._writing = None

    def kill(self, rng: Random) -> None:
        """Do a random part of the write that is under way, and write nothing after that."""
        if self._writing is not None:
            self._file.end_after(rng.randrange(2 * STAGING_ROWS * self._disk.file.shape.block_bytes))
            with suppress(OSError):  # the disk is full
                self._writing()
        self._file.end_after(0)

    def _bytes_s(self, num_bytes: int) -> float:
        return varied(num_bytes / self._disk.bytes_per_s, self._disk.deviation, self._rng)

    def close(self) -> None:
        """Do nothing: there are no threads."""


async def _after(delay_s: float, job: Callable[[], ResultT]) -> ResultT:
    async def run() -> ResultT:
        await asyncio.sleep(delay_s)
        return job()

    return await asyncio.get_running_loop().create_task(run(), context=NETWORK.copy())
