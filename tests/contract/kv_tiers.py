"""Builds each implementation of `KvTier` with the device memory that it copies from and to."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_events import KvEventKind, Tier
from baton.engine.tiers.kv_tier import BlockToStore, KvTier, TierCounts
from baton.model.device.host_staging import DeviceCopies
from baton.model.device.kv_tensors import KvCache
from baton.sim.sim_disk import SimDisk
from baton.sim.sim_memory import EMPTY, SimMemory
from baton.sim.sim_tier import SimTierMemory
from baton.transfer.backends.host_memory import Bytes, allocate_private
from baton.transfer.integrity.generation_table import MemoryGenerationTable
from baton.worker.disk.block_file import BlockFile
from baton.worker.disk.disk_format import file_shape
from baton.worker.disk.disk_runner import DiskThreads
from baton.worker.disk.nixl_payloads import NixlPayloads
from baton.worker.disk.open_block_file import lock_block_file
from baton.worker.disk.os_file import OsFile, RawFile
from baton.worker.disk.payload_io import PayloadIo, PlainPayloads
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.host_tier import HostTier
from baton.worker.tiers.tier_copies import CopyRunner, CopyThread, HostCopies, TierCopies
from tests import builders

NUM_BLOCKS, NUM_SLOTS = 16, 8
BLOCK_SIZE_TOKENS = 4
LAYOUT = builders.layout()
WORKER = builders.worker_ref("p0", epoch=7)


@dataclass(kw_only=True)
class Device:
    """A tier, and the device blocks beside it."""

    tier: KvTier
    blocks: np.ndarray
    faults: "Faults"

    def fill(self, block_id: int, seed: int) -> None:
        self.blocks[block_id] = np.frombuffer(Random(seed).randbytes(LAYOUT.block_bytes), dtype=np.uint8)

    def holds(self, block_id: int, seed: int) -> bool:
        return bytes(self.blocks[block_id]) == Random(seed).randbytes(LAYOUT.block_bytes)

    def clear(self) -> None:
        self.blocks[:] = 0

    def is_clear(self, block_id: int) -> bool:
        return not self.blocks[block_id].any()


class SimDevice(Device):
    """A tier beside simulated device memory."""

    def __init__(self, *, tier: KvTier, memory: SimMemory, faults: "Faults") -> None:
        self.tier, self.memory, self.faults = tier, memory, faults

    def fill(self, block_id: int, seed: int) -> None:
        self.memory.write_block(block_id, self._content(seed))

    def holds(self, block_id: int, seed: int) -> bool:
        return self.memory.block(block_id) == self._content(seed)

    def clear(self) -> None:
        for block_id in range(self.memory.num_blocks):
            self.memory.write_block(block_id, [EMPTY] * self.memory.block_size_tokens)

    def is_clear(self, block_id: int) -> bool:
        return set(self.memory.block(block_id)) == {EMPTY}

    def _content(self, seed: int) -> tuple[int, ...]:
        rng = Random(seed)
        return tuple(rng.getrandbits(60) for _ in range(self.memory.block_size_tokens))


class Faults:
    """Stops copies, while `gate` is not set, and fails them."""

    def __init__(self) -> None:
        self.failing = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()

    def stop(self) -> None:
        """Let copies wait. `waiting` is set when one does."""
        self.gate.clear()
        self.waiting.clear()


class MemoryTier:
    """Implements `KvTier` with a dict: the reference."""

    tier = Tier.HOST

    def __init__(self, blocks: np.ndarray, faults: Faults) -> None:
        self._blocks, self._faults = blocks, faults
        self._content: dict[BlockHash, tuple[BlockToStore, bytes]] = {}
        self._filling: dict[BlockHash, bool] = {}  # False: discarded meanwhile
        self._announced_late: set[BlockHash] = set()  # while they were filled
        self._changes: list[tuple[KvEventKind, BlockHash]] = []

    @property
    def stores_busy_s(self) -> float:
        return 0.0

    def counts(self) -> TierCounts:
        held, busy = len(self._content), len(self._filling)
        return TierCounts(total=NUM_SLOTS, free=NUM_SLOTS - held - busy, held=held, busy=busy)

    @property
    def answers(self) -> bool:
        return True

    @property
    def store_pause_s(self) -> float:
        return 0.0

    def holds(self, block_hash: BlockHash) -> bool:
        return block_hash in self._content

    def load_s(self, num_blocks: int) -> float | None:
        return None

    @property
    def load_block_s(self) -> float | None:
        return None

    def store_s(self, num_blocks: int) -> float | None:
        return None

    async def store(self, blocks: Sequence[BlockToStore]) -> int:
        return await to_its_end(self._store(blocks))

    async def load(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[int], *, within_s: float | None = None
    ) -> int:
        return await to_its_end(self._load(hashes, block_ids))

    async def _store(self, blocks: Sequence[BlockToStore]) -> int:
        chosen = [b for b in blocks if b.block_hash not in self._content and b.block_hash not in self._filling]
        chosen = chosen[:NUM_SLOTS]
        while len(self._content) + len(self._filling) + len(chosen) > NUM_SLOTS and self._content:
            self.discard(next(iter(self._content)))
        self._filling |= {b.block_hash: True for b in chosen}
        is_complete = await passed(self._faults)
        num_stored = 0
        for block in chosen:
            if block.block_hash in self._announced_late:
                self._announced_late.remove(block.block_hash)
                block = replace(block, is_announced=True)
            if self._filling.pop(block.block_hash) and is_complete:
                self._content[block.block_hash] = (block, bytes(self._blocks[block.block_id]))
                if block.is_announced:
                    self._changes.append((KvEventKind.STORED, block.block_hash))
                num_stored += 1
        return num_stored

    async def _load(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> int:
        if not await passed(self._faults):
            return 0
        count = 0
        for block_hash, block_id in zip(hashes, block_ids, strict=False):
            if block_hash not in self._content:
                break
            self._blocks[block_id] = np.frombuffer(self._content[block_hash][1], dtype=np.uint8)
            count += 1
        return count

    def count_use(self, block_hash: BlockHash) -> None:
        """Do nothing: this tier evicts nothing."""

    def announce(self, block_hash: BlockHash) -> None:
        if block_hash in self._filling:
            self._announced_late.add(block_hash)
        elif block_hash in self._content and not self._content[block_hash][0].is_announced:
            block, content = self._content[block_hash]
            self._content[block_hash] = (replace(block, is_announced=True), content)
            self._changes.append((KvEventKind.STORED, block_hash))

    def discard(self, block_hash: BlockHash) -> None:
        if block_hash in self._filling:
            self._filling[block_hash] = False
        found = self._content.pop(block_hash, None)
        if found is not None and found[0].is_announced:
            self._changes.append((KvEventKind.EVICTED, block_hash))

    def announced_hashes(self) -> list[BlockHash]:
        return [block_hash for block_hash, (block, _) in self._content.items() if block.is_announced]

    async def erase_tenant(self, tenant_root: BlockHash) -> int:
        erased = [each for each, (block, _) in self._content.items() if block.tenant_root in (tenant_root, NO_HASH)]
        for block_hash in erased:
            self.discard(block_hash)
        return len(erased)

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        events, self._changes = self._changes, []
        return events

    async def aclose(self) -> None:
        pass


async def to_its_end(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` until it ends, even if the caller is cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


async def passed(faults: Faults) -> bool:
    """Wait at the gate. Returns False if copies fail."""
    faults.waiting.set()
    await faults.gate.wait()
    return not faults.failing


class GatedRunner:
    """A `CopyRunner` that stops and fails copies before it gives them to `inner`, or to the event loop."""

    def __init__(self, faults: Faults, inner: CopyRunner | None) -> None:
        self._faults, self._inner = faults, inner

    async def run(self, copy: Callable[[], None], num_bytes: int) -> float:
        if not await passed(self._faults):
            raise RuntimeError("the device failed")
        if self._inner is not None:
            return await self._inner.run(copy, num_bytes)
        copy()
        return num_bytes / 1e9

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


MakeCopies = Callable[[np.ndarray, np.ndarray], TierCopies]


def _torch_copies(device: np.ndarray, host: np.ndarray) -> TierCopies:
    return DeviceCopies(KvCache.over(device.reshape(-1).data, LAYOUT), host)


@asynccontextmanager
async def host_tier(make_copies: MakeCopies, *, in_thread: bool) -> AsyncIterator[Device]:
    faults = Faults()
    device, host = (allocate_private(count, LAYOUT.block_bytes) for count in (NUM_BLOCKS, NUM_SLOTS))
    tier = HostTier(
        worker=WORKER,
        num_slots=NUM_SLOTS,
        block_bytes=LAYOUT.block_bytes,
        generations=MemoryGenerationTable(host.generation_table, WORKER.worker_epoch),
        copies=make_copies(device.kv, host.kv),
        runner=GatedRunner(faults, CopyThread() if in_thread else None),
    )
    yield Device(tier=tier, blocks=device.kv, faults=faults)
    await tier.aclose()
    tier.slots.check()
    device.close()
    host.close()


@asynccontextmanager
async def memory_tier() -> AsyncIterator[Device]:
    faults, blocks = Faults(), np.zeros((NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    yield Device(tier=MemoryTier(blocks, faults), blocks=blocks, faults=faults)


class GatedDiskRunner:
    """A `DiskRunner` without threads."""

    writes_busy_s = 0.0

    async def read(self, job: Callable[[], Any], num_bytes: int) -> Any:
        return job()

    async def write(self, job: Callable[[], Any], num_bytes: int) -> Any:
        return job()

    def close(self) -> None:
        pass


@asynccontextmanager
async def disk_tier(payloads: Callable[[RawFile, Bytes], PayloadIo], *, in_thread: bool) -> AsyncIterator[Device]:
    faults = Faults()
    memory = allocate_private(NUM_BLOCKS, LAYOUT.block_bytes)
    staging = allocate_private(2 * NUM_SLOTS, LAYOUT.block_bytes)
    shape = replace(file_shape(LAYOUT, 2**20), num_slots=NUM_SLOTS)
    with tempfile.TemporaryDirectory() as directory:
        locked = lock_block_file(Path(directory) / "kv", shape)
        tier = DiskTier(
            worker=WORKER,
            store=BlockFile(OsFile(locked.fd), shape, locked.file_id, staging.kv, payloads),
            block_bytes=LAYOUT.block_bytes,
            num_rows=staging.num_blocks,
            copies=HostCopies(memory.kv, staging.kv),
            copy_runner=GatedRunner(faults, CopyThread() if in_thread else None),
            disk_runner=DiskThreads() if in_thread else GatedDiskRunner(),
        )
        yield Device(tier=tier, blocks=memory.kv, faults=faults)
        await tier.aclose()
        tier.slots.check()
        assert not tier.defects
    staging.close()
    memory.close()


@asynccontextmanager
async def simulated_host_tier() -> AsyncIterator[Device]:
    faults, device = Faults(), SimMemory(NUM_BLOCKS, BLOCK_SIZE_TOKENS)
    tier = SimTierMemory.of(WORKER, NUM_SLOTS, BLOCK_SIZE_TOKENS).open(WORKER, device, LAYOUT.block_bytes)
    tier._runner = GatedRunner(faults, tier._runner)
    yield SimDevice(tier=tier, memory=device, faults=faults)
    await tier.aclose()
    tier.slots.check()


@asynccontextmanager
async def simulated_disk_tier() -> AsyncIterator[Device]:
    faults, device = Faults(), SimMemory(NUM_BLOCKS, BLOCK_SIZE_TOKENS)
    disk = SimDisk(NUM_SLOTS, BLOCK_SIZE_TOKENS)
    tier = disk.open(WORKER, device, LAYOUT.block_bytes)
    tier._copy_runner = GatedRunner(faults, tier._copy_runner)
    yield SimDevice(tier=tier, memory=device, faults=faults)
    await tier.aclose()
    tier.slots.check()
    assert disk.store is not None
    disk.store.check()
    assert not tier.defects


TIERS: dict[str, Callable[[], Any]] = {
    "memory": memory_tier,
    "host": partial(host_tier, HostCopies, in_thread=True),
    "host-torch": partial(host_tier, _torch_copies, in_thread=True),
    "host-in-loop": partial(host_tier, HostCopies, in_thread=False),
    "host-simulated": simulated_host_tier,
    "disk": partial(disk_tier, PlainPayloads, in_thread=True),
    "disk-nixl": partial(disk_tier, NixlPayloads, in_thread=True),
    "disk-in-loop": partial(disk_tier, PlainPayloads, in_thread=False),
    "disk-simulated": simulated_disk_tier,
}
