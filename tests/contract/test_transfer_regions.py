"""A worker's second region: each backend reads its blocks and generation-table entries as those of the
first."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest

from baton.core.errors import LayoutMismatch
from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_tier import SimTierMemory
from baton.sim.sim_transfer_backend import LinkModel, SimFabric, SimTransferBackend
from baton.transfer.backend import KvDescriptor, ReadState, TransferBackend
from baton.transfer.backends.host_memory import HostMemory, allocate_private, allocate_shared
from baton.transfer.backends.local_backend import LocalBackend
from baton.transfer.backends.nixl.nixl_backend import NixlBackend
from baton.transfer.backends.several_backends import SeveralBackends
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from tests import builders

LAYOUT = builders.layout()
OWNER, READER = builders.worker_ref("p0", epoch=7), builders.worker_ref("d0", epoch=8)
NUM_BLOCKS, NUM_SLOTS = 8, 5


@dataclass(kw_only=True)
class Regions:
    """An owner with two regions, and a reader. `put` writes into a region of the owner, `got` reads own
    blocks.

    transfer: name of the backend that reads, of those that both have
    """

    owner: TransferBackend
    reader: TransferBackend
    tables: tuple[MemoryGenerationTable, MemoryGenerationTable]
    put: Callable[[int, int, int], None]
    got: Callable[[int, int], bool]
    transfer: str = ""

    def __post_init__(self) -> None:
        self.server = self.owner.serve(READER, self._to_reader)

    @property
    def memory(self) -> list[KvMemory]:
        """Both regions of the owner."""
        return [memory for memory in self.owner.memory if memory.transfer == self.transfer or not self.transfer]

    def send(self, message: GroupMessage) -> None:
        asyncio.get_running_loop().call_soon(self.server.receive, message)

    def start_read(self, read_id: int, region: int, block_ids: tuple[int, ...], own: tuple[int, ...]) -> None:
        source = KvDescriptor(memory=self.memory[region], block_ids=block_ids)
        self.reader.start_read(ReadId(read_id), source, own)
        if self.reader.is_two_sided(source.memory):
            ids = [region * NUM_BLOCKS + block_id for block_id in block_ids]
            asyncio.get_running_loop().call_soon(self.server.expect_read, ReadId(read_id), ids)

    def _to_reader(self, message: GroupMessage) -> None:
        asyncio.get_running_loop().call_soon(self.reader.receive, self.memory[0], message)


def content(seed: int, size: int) -> bytes:
    return Random(seed).randbytes(size)


def _table(memory: HostMemory, epoch: int) -> MemoryGenerationTable:
    return MemoryGenerationTable(memory.generation_table, epoch)


@asynccontextmanager
async def _host(allocate: Any, make: Any, transfer: str = "") -> AsyncIterator[Regions]:
    size = LAYOUT.block_bytes
    device, tier, own = (allocate(count, size) for count in (NUM_BLOCKS, NUM_SLOTS, NUM_BLOCKS))
    tables = (_table(device, OWNER.worker_epoch), _table(tier, OWNER.worker_epoch))
    _table(own, READER.worker_epoch)
    owner = make(device, worker=OWNER, layout=LAYOUT, tier=tier)
    reader = make(own, worker=READER, layout=LAYOUT)

    def put(region: int, block_id: int, seed: int) -> None:
        memoryview((device, tier)[region].kv[block_id].data)[:] = content(seed, size)

    def got(block_id: int, seed: int) -> bool:
        return bytes(own.kv[block_id]) == content(seed, size)

    regions = Regions(owner=owner, reader=reader, tables=tables, put=put, got=got, transfer=transfer)
    yield regions
    regions.server.close()
    for backend in (reader, owner):
        await backend.aclose()
    for memory in (device, tier, own):
        memory.close()


def _local(memory: HostMemory, **settings: Any) -> TransferBackend:
    return LocalBackend(memory=memory, **settings)


def _nixl(memory: HostMemory, **settings: Any) -> TransferBackend:
    return NixlBackend.over(memory, loopback_only=True, **settings)


def _gloo(
    memory: HostMemory, *, worker: WorkerRef, layout: KvLayout, tier: HostMemory | None = None
) -> TransferBackend:
    from baton.transfer.backends.collective.collective_backend import CollectiveBackend
    from baton.transfer.backends.collective.group_kinds import GlooKind

    kind = GlooKind(layout, memory, host="127.0.0.1", tier=tier)
    num_slots = 0 if tier is None else tier.num_blocks
    return CollectiveBackend(
        worker=worker, layout=layout, kind=kind, num_blocks=memory.num_blocks, num_slots=num_slots, silence_s=10.0
    )


def _auto(memory: HostMemory, **settings: Any) -> TransferBackend:
    return SeveralBackends([make(memory, **settings) for make in (_nixl, _local, _gloo)])


@asynccontextmanager
async def _simulated() -> AsyncIterator[Regions]:
    fabric, size = SimFabric(Random(0), LinkModel()), LAYOUT.block_size_tokens
    device, own = SimMemory(NUM_BLOCKS, size), SimMemory(NUM_BLOCKS, size)
    tier = SimTierMemory.of(OWNER, NUM_SLOTS, size)
    tables = [
        MemoryGenerationTable(bytearray(NUM_BLOCKS * ENTRY_BYTES), worker.worker_epoch) for worker in (OWNER, READER)
    ]
    make = partial(SimTransferBackend, fabric=fabric, layout=LAYOUT)

    def put(region: int, block_id: int, seed: int) -> None:
        (device, tier.memory)[region].write_block(block_id, content(seed, size))

    yield Regions(
        owner=make(worker=OWNER, memory=device, generations=tables[0], tier=tier),
        reader=make(worker=READER, memory=own, generations=tables[1]),
        tables=(tables[0], tier.generations),
        put=put,
        got=lambda block_id, seed: bytes(own.block(block_id)) == content(seed, size),
    )


BACKENDS: dict[str, Callable[[], Any]] = {
    "local": partial(_host, allocate_shared, _local),
    "nixl": partial(_host, allocate_private, _nixl),
    "gloo": partial(_host, allocate_private, _gloo),
    **{
        f"auto-{transfer}": partial(_host, allocate_shared, _auto, transfer)
        for transfer in ("nixl", "local", "collective")
    },
    "simulated": _simulated,
}


@pytest.mark.parametrize("kind", BACKENDS)
def test_blocks_and_entries_of_both_regions_are_read(kind: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), BACKENDS[kind]() as regions:
            assert [memory.num_blocks for memory in regions.memory] == [NUM_BLOCKS, NUM_SLOTS]
            for memory in regions.memory:
                regions.reader.connect(memory, LAYOUT, regions.send)
            for region, num_blocks in enumerate((NUM_BLOCKS, NUM_SLOTS)):
                for block_id in range(num_blocks):
                    regions.put(region, block_id, 100 * region + block_id)
                    for _ in range(region + 1):
                        regions.tables[region].begin_generation(block_id)
                    regions.tables[region].set_hash(block_id, bytes([region + 1, block_id]) * 8)
            for region, memory in reversed(list(enumerate(regions.memory))):
                source = KvDescriptor(memory=memory, block_ids=(4, 0, 1))
                regions.start_read(10 + region, region, source.block_ids, (2, 5, 6))
                assert await regions.reader.wait(ReadId(10 + region)) is ReadState.DONE
                seeds = [100 * region + block_id for block_id in source.block_ids]
                assert all(regions.got(own, seed) for own, seed in zip((2, 5, 6), seeds, strict=True))
                regions.reader.start_read_generations(ReadId(20 + region), source, ReadId(10 + region))
                assert await regions.reader.wait(ReadId(20 + region)) is ReadState.DONE
                entries = regions.reader.generations(ReadId(20 + region))
                assert [entry.generation for entry in entries] == [region + 1] * 3
                assert [entry.block_hash for entry in entries] == [bytes([region + 1, n]) * 8 for n in (4, 0, 1)]
                assert {entry.worker_epoch for entry in entries} == {OWNER.worker_epoch}
            for memory in regions.memory:
                regions.reader.forget(memory)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["local", "nixl"])
def test_a_region_of_another_block_size_is_refused(kind: str) -> None:
    allocate, make = (allocate_shared, _local) if kind == "local" else (allocate_private, _nixl)
    memory, tier = allocate(NUM_BLOCKS, LAYOUT.block_bytes), allocate(NUM_SLOTS, LAYOUT.block_bytes // 2)
    with pytest.raises(LayoutMismatch, match="block_bytes"):
        make(memory, worker=OWNER, layout=LAYOUT, tier=tier)
    for each in (memory, tier):
        each.close()
