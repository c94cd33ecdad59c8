"""Builds each implementation of `TransferBackend` with the memories of two workers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from random import Random

import numpy as np
import pytest

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_transfer_backend import LinkModel, SimFabric, SimTransferBackend
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadServer, ReadState, TransferBackend
from baton.transfer.backends.host_memory import HostMemory, allocate_private, allocate_shared
from baton.transfer.backends.local_backend import LocalBackend
from baton.transfer.backends.nixl.nixl_backend import NixlBackend
from baton.transfer.backends.several_backends import SeveralBackends
from baton.transfer.backends.staged_backend import StagedBackend
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from tests import builders

NUM_BLOCKS = 32
LAYOUT = builders.layout()


def pattern(seed: int, size: int) -> bytes:
    """Return the content of a block that was filled with `seed`."""
    return Random(seed).randbytes(size)


@dataclass(kw_only=True)
class Endpoint:
    """One worker: its backend, and its memory with functions to fill and check it."""

    worker: WorkerRef
    backend: TransferBackend
    generation_table: MemoryGenerationTable
    fill: Callable[[int, int], None]
    holds: Callable[[int, int], bool]


@dataclass(kw_only=True)
class Pair:
    """Two workers. The reader is connected to the owner and reads its blocks.

    transfer: name of the backend that reads, of those that both have
    """

    owner: Endpoint
    reader: Endpoint
    transfer: str = ""
    read_ids: count = field(default_factory=lambda: count(1))
    server: ReadServer = field(init=False)

    def __post_init__(self) -> None:
        self.server = self.owner.backend.serve(self.reader.worker, self._to_reader)

    @property
    def memory(self) -> KvMemory:
        """The owner's own blocks."""
        regions = self.owner.backend.memory
        return next(memory for memory in regions if memory.transfer == self.transfer or not self.transfer)

    def send(self, message: GroupMessage) -> None:
        """Send a message of a process group to the owner."""
        asyncio.get_running_loop().call_soon(self.server.receive, message)

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        """Return where to read blocks of the owner."""
        return KvDescriptor(memory=self.memory, block_ids=tuple(block_ids))

    def start(self, blocks: dict[int, int]) -> ReadId:
        """Start to read blocks. `blocks` maps the owner's block ids to the reader's."""
        read_id = ReadId(next(self.read_ids))
        self.owner.backend.offer(tuple(blocks))
        self.reader.backend.start_read(read_id, self.describe(tuple(blocks)), tuple(blocks.values()))
        self.announce(read_id, tuple(blocks))
        return read_id

    def announce(self, read_id: ReadId, block_ids: tuple[int, ...]) -> None:
        """Tell the owner of a read, if it takes part in it."""
        if self.reader.backend.is_two_sided(self.memory):
            asyncio.get_running_loop().call_soon(self.server.expect_read, read_id, block_ids)

    async def read(self, blocks: dict[int, int]) -> ReadState:
        read_id = self.start(blocks)
        state = await self.reader.backend.wait(read_id)
        self.reader.backend.release(read_id)
        return state

    async def read_validated(self, blocks: dict[int, int]) -> tuple[GenerationEntry, ...]:
        """Read blocks, and return the entries as the reader's validation sees them."""
        payload = self.start(blocks)
        assert await self.reader.backend.wait(payload) is ReadState.DONE
        entries = await self.entries(payload, blocks)
        self.reader.backend.release(payload)
        return entries

    async def entries(self, payload: ReadId, block_ids: Iterable[int]) -> tuple[GenerationEntry, ...]:
        """Return the entries of the blocks of a read that has ended."""
        read_id = ReadId(next(self.read_ids))
        self.reader.backend.start_read_generations(read_id, self.describe(tuple(block_ids)), payload)
        assert await self.reader.backend.wait(read_id) is ReadState.DONE
        entries = self.reader.backend.generations(read_id)
        self.reader.backend.release(read_id)
        return entries

    async def probe(self, *block_ids: int) -> ReadState:
        read_id = ReadId(next(self.read_ids))
        self.reader.backend.start_probe(read_id, self.describe(block_ids))
        self.announce(read_id, block_ids)
        state = await self.reader.backend.wait(read_id)
        self.reader.backend.release(read_id)
        return state

    def _to_reader(self, message: GroupMessage) -> None:
        asyncio.get_running_loop().call_soon(self.reader.backend.receive, self.memory, message)


PairFactory = Callable[[], AbstractAsyncContextManager[Pair]]


def _filling(kv: np.ndarray) -> tuple[Callable[[int, int], None], Callable[[int, int], bool]]:
    """Return `fill` and `holds` of a `Endpoint` for these blocks, [num_blocks, block_bytes]."""

    def fill(block_id: int, seed: int) -> None:
        kv[block_id] = np.frombuffer(pattern(seed, kv.shape[1]), dtype=np.uint8)

    def holds(block_id: int, seed: int) -> bool:
        return bytes(kv[block_id]) == pattern(seed, kv.shape[1])

    return fill, holds


def _endpoint(worker: WorkerRef, backend: TransferBackend, memory: HostMemory) -> Endpoint:
    fill, holds = _filling(memory.kv)
    return Endpoint(
        worker=worker,
        backend=backend,
        generation_table=MemoryGenerationTable(memory.generation_table, worker.worker_epoch),
        fill=fill,
        holds=holds,
    )


Make = Callable[[WorkerRef, KvLayout, HostMemory], TransferBackend]
Allocate = Callable[[int, int], HostMemory]
WORKERS = (builders.worker_ref("p0", epoch=7), builders.worker_ref("d0", epoch=8))


def _nixl(worker: WorkerRef, layout: KvLayout, memory: HostMemory) -> TransferBackend:
    return NixlBackend.over(memory, worker=worker, layout=layout, loopback_only=True)


def _local(worker: WorkerRef, layout: KvLayout, memory: HostMemory) -> TransferBackend:
    return LocalBackend(worker=worker, layout=layout, memory=memory)


def _gloo(worker: WorkerRef, layout: KvLayout, memory: HostMemory) -> TransferBackend:
    from baton.transfer.backends.collective.collective_backend import CollectiveBackend
    from baton.transfer.backends.collective.group_kinds import GlooKind

    kind = GlooKind(layout, memory, host="127.0.0.1")
    return CollectiveBackend(worker=worker, layout=layout, kind=kind, num_blocks=memory.num_blocks, silence_s=10.0)


def _auto(worker: WorkerRef, layout: KvLayout, memory: HostMemory) -> TransferBackend:
    return SeveralBackends([make(worker, layout, memory) for make in (_nixl, _local, _gloo)])


async def _connected(make: Make, allocate: Allocate, transfer: str = "") -> tuple[Pair, list[HostMemory]]:
    memories = [allocate(NUM_BLOCKS, LAYOUT.block_bytes) for _ in WORKERS]
    tables = [MemoryGenerationTable(m.generation_table, w.worker_epoch) for m, w in zip(memories, WORKERS, strict=True)]
    assert len(tables) == 2  # writes the epochs before a peer can read them
    endpoints = [_endpoint(w, make(w, LAYOUT, m), m) for w, m in zip(WORKERS, memories, strict=True)]
    return Pair(owner=endpoints[0], reader=endpoints[1], transfer=transfer), memories


async def _close(pair: Pair, memories: list[HostMemory]) -> None:
    pair.server.close()
    for endpoint in (pair.reader, pair.owner):
        await endpoint.backend.aclose()
    for memory in memories:
        memory.close()


def _connect(pair: Pair) -> None:
    pair.reader.backend.connect(pair.memory, LAYOUT, pair.send)


@asynccontextmanager
async def _open(connected: Callable[[], Awaitable[tuple[Pair, list[HostMemory]]]]) -> AsyncIterator[Pair]:
    pair, memories = await connected()
    _connect(pair)
    yield pair
    await _close(pair, memories)


def _allocate_named(num_blocks: int, block_bytes: int) -> HostMemory:
    """Allocate shared memory as on systems without memfd."""
    return allocate_shared(num_blocks, block_bytes, memfd=False)


async def _staged(make: Make, allocate: Allocate, transfer: str = "") -> tuple[Pair, list[HostMemory]]:
    """Build a staged backend; torch host memory takes the place of a device."""
    from baton.model.device.host_staging import HostStaging
    from baton.model.device.kv_tensors import KvCache

    caches: list[KvCache] = []

    def staged(worker: WorkerRef, layout: KvLayout, memory: HostMemory) -> TransferBackend:
        caches.append(KvCache.zeros(layout, NUM_BLOCKS))
        return StagedBackend(make(worker, layout, memory), HostStaging(caches[-1], memory.kv))

    pair, memories = await _connected(staged, allocate)
    endpoints = [
        replace(endpoint, fill=fill, holds=holds)
        for endpoint, cache in zip((pair.owner, pair.reader), caches, strict=True)
        for fill, holds in [_filling(cache.memory.numpy())]
    ]
    return Pair(owner=endpoints[0], reader=endpoints[1], transfer=transfer), memories


async def _gpu_messages(allocate: Allocate) -> tuple[Pair, list[HostMemory]]:
    """Build the backend of a GPU's KV cache; host memory takes the place of the GPU, Gloo that of NCCL."""
    from baton.model.device.kv_tensors import KvCache
    from baton.transfer.backends.collective.collective_backend import CollectiveBackend
    from baton.transfer.backends.collective.gpu_messages import GpuMessages
    from baton.transfer.backends.collective.group_kinds import GlooKind

    caches: list[KvCache] = []

    def make(worker: WorkerRef, layout: KvLayout, memory: HostMemory) -> TransferBackend:
        caches.append(KvCache.zeros(layout, NUM_BLOCKS))
        kind = GlooKind(layout, memory, host="127.0.0.1")
        kind.messages = GpuMessages(layout, caches[-1].memory, memory.generation_table)  # type: ignore[assignment]
        return CollectiveBackend(worker=worker, layout=layout, kind=kind, num_blocks=NUM_BLOCKS, silence_s=10.0)

    pair, memories = await _connected(make, allocate)
    endpoints = [
        replace(endpoint, fill=fill, holds=holds)
        for endpoint, cache in zip((pair.owner, pair.reader), caches, strict=True)
        for fill, holds in [_filling(cache.memory.numpy())]
    ]
    return Pair(owner=endpoints[0], reader=endpoints[1]), memories


async def _nccl() -> tuple[Pair, list[HostMemory]]:
    """Build two backends over NCCL in this process, each with a GPU of its own."""
    import torch

    from baton.model.device.kv_tensors import KvCache
    from baton.transfer.backends.collective.collective_backend import CollectiveBackend
    from baton.transfer.backends.collective.group_kinds import NcclKind

    if torch.cuda.device_count() < len(WORKERS):
        pytest.skip("NCCL forms no group of two on one GPU; two GPUs are needed")
    endpoints: list[Endpoint] = []
    memories: list[HostMemory] = []
    for number, worker in enumerate(WORKERS):
        memories.append(allocate_private(NUM_BLOCKS, LAYOUT.block_bytes))
        table = MemoryGenerationTable(memories[-1].generation_table, worker.worker_epoch)
        cache = KvCache.zeros(LAYOUT, NUM_BLOCKS, f"cuda:{number}")
        kind = NcclKind(LAYOUT, cache.memory, memories[-1].generation_table)

        def fill(block_id: int, seed: int, kv: torch.Tensor = cache.memory) -> None:
            kv[block_id].copy_(torch.frombuffer(bytearray(pattern(seed, LAYOUT.block_bytes)), dtype=torch.uint8))
            torch.cuda.synchronize(kv.device)

        def holds(block_id: int, seed: int, kv: torch.Tensor = cache.memory) -> bool:
            return bytes(kv[block_id].cpu().numpy()) == pattern(seed, LAYOUT.block_bytes)

        backend = CollectiveBackend(worker=worker, layout=LAYOUT, kind=kind, num_blocks=NUM_BLOCKS, silence_s=20.0)
        endpoints.append(Endpoint(worker=worker, backend=backend, generation_table=table, fill=fill, holds=holds))
    return Pair(owner=endpoints[0], reader=endpoints[1]), memories


@asynccontextmanager
async def sim_pair() -> AsyncIterator[Pair]:
    fabric = SimFabric(Random(0), LinkModel())
    endpoints = []
    for worker in WORKERS:
        memory = SimMemory(NUM_BLOCKS, LAYOUT.block_size_tokens)
        table = MemoryGenerationTable(bytearray(NUM_BLOCKS * ENTRY_BYTES), worker.worker_epoch)
        backend = SimTransferBackend(fabric=fabric, worker=worker, layout=LAYOUT, memory=memory, generations=table)

        def fill(block_id: int, seed: int, memory: SimMemory = memory) -> None:
            memory.write_block(block_id, pattern(seed, LAYOUT.block_size_tokens))

        def holds(block_id: int, seed: int, memory: SimMemory = memory) -> bool:
            return bytes(memory.block(block_id)) == pattern(seed, LAYOUT.block_size_tokens)

        endpoints.append(Endpoint(worker=worker, backend=backend, generation_table=table, fill=fill, holds=holds))
    pair = Pair(owner=endpoints[0], reader=endpoints[1])
    _connect(pair)
    yield pair
    for endpoint in endpoints:
        await endpoint.backend.aclose()


BACKENDS: dict[str, PairFactory] = {
    "nixl": partial(_open, partial(_connected, _nixl, allocate_private)),
    "local": partial(_open, partial(_connected, _local, allocate_shared)),
    "local-named": partial(_open, partial(_connected, _local, _allocate_named)),
    "staged-nixl": partial(_open, partial(_staged, _nixl, allocate_private)),
    "staged-local": partial(_open, partial(_staged, _local, allocate_shared)),
    "gloo": partial(_open, partial(_connected, _gloo, allocate_private)),
    "gloo-gpu-messages": partial(_open, partial(_gpu_messages, allocate_private)),
    "nccl": partial(_open, _nccl),
    "staged-gloo": partial(_open, partial(_staged, _gloo, allocate_private)),
    **{
        f"auto-{transfer}": partial(_open, partial(_connected, _auto, allocate_shared, transfer))
        for transfer in ("nixl", "local", "collective")
    },
    "staged-auto": partial(_open, partial(_staged, _auto, allocate_shared, "collective")),
    "sim": sim_pair,
}
