"""Two simulated workers, one of which reads KV from the other, with one-sided or two-sided reads."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.peer_messages import GroupMessage
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_tier import SimTierMemory
from baton.sim.sim_transfer_backend import LinkModel, SimFabric, SimTransferBackend
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from tests import builders

NUM_BLOCKS, NUM_SLOTS = 8, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SimWorkerMemory:
    """A worker's backend and what it reads and writes. `tier` is None if the worker has no slots."""

    worker: WorkerRef
    backend: SimTransferBackend
    memory: SimMemory
    generations: MemoryGenerationTable
    tier: SimTierMemory | None


def sim_worker(
    fabric: SimFabric,
    worker: WorkerRef,
    layout: KvLayout,
    *,
    num_blocks: int = NUM_BLOCKS,
    num_slots: int = 0,
    two_sided: bool = False,
) -> SimWorkerMemory:
    """Open a worker on a fabric. All workers of one fabric must have the same `two_sided`."""
    memory = SimMemory(num_blocks, layout.block_size_tokens)
    generations = MemoryGenerationTable(bytearray(num_blocks * ENTRY_BYTES), worker.worker_epoch)
    tier = SimTierMemory.of(worker, num_slots, layout.block_size_tokens) if num_slots else None
    backend = SimTransferBackend(
        fabric=fabric,
        worker=worker,
        layout=layout,
        memory=memory,
        generations=generations,
        tier=tier,
        two_sided=two_sided,
    )
    return SimWorkerMemory(worker=worker, backend=backend, memory=memory, generations=generations, tier=tier)


class SimPairStream:
    """One stream from a reader to an owner, on which the reader has connected.

    Messages arrive in order, in the next turn of the loop; after `cut` they are lost, in both directions.
    """

    def __init__(self, owner: SimWorkerMemory, reader: SimWorkerMemory, layout: KvLayout) -> None:
        self._owner, self._reader = owner, reader
        self._is_cut = False
        self.server = owner.backend.serve(reader.worker, self._to_reader)
        for region in owner.backend.memory:
            reader.backend.connect(region, layout, self._to_owner)

    def expect_read(self, read_id: ReadId, block_ids: Sequence[int]) -> None:
        """Announce a read to the owner, which grants it."""
        self._send(self.server.expect_read, read_id, tuple(block_ids))

    def refuse_read(self, read_id: ReadId, num_blocks: int) -> None:
        """Announce a read to the owner, which refuses it."""
        self._send(self.server.refuse_read, read_id, num_blocks)

    def cut(self) -> None:
        """Lose all further messages. The owner has not noticed it: it closes `server` later."""
        self._is_cut = True

    def _to_owner(self, message: GroupMessage) -> None:
        self._send(self.server.receive, message)

    def _to_reader(self, message: GroupMessage) -> None:
        self._send(self._reader.backend.receive, self._owner.backend.memory[0], message)

    def _send(self, receive: Callable[..., None], *message: Any) -> None:
        asyncio.get_running_loop().call_soon(self._arrive, receive, message)

    def _arrive(self, receive: Callable[..., None], message: tuple[Any, ...]) -> None:
        if not self._is_cut:
            receive(*message)


class SimPair:
    """A reader with a stream to an owner. Block `n` of the owner's region `r` holds `content(n, r)`.

    stream: the one that was opened last
    """

    def __init__(self, *, two_sided: bool = True, link: LinkModel | None = None, seed: int = 0) -> None:
        self.layout = builders.layout()
        self.fabric = SimFabric(Random(seed), link or LinkModel())
        self.owner = sim_worker(
            self.fabric, builders.worker_ref("p0", epoch=7), self.layout, num_slots=NUM_SLOTS, two_sided=two_sided
        )
        self.reader = sim_worker(self.fabric, builders.worker_ref("d0", epoch=8), self.layout, two_sided=two_sided)
        self._read_ids = count(1)
        assert self.owner.tier is not None
        for region, memory in enumerate((self.owner.memory, self.owner.tier.memory)):
            for block_id in range(memory.num_blocks):
                memory.write_block(block_id, self.content(block_id, region))
        self.stream = self.open_stream()

    def open_stream(self) -> SimPairStream:
        """Connect the reader over a new stream, and use it from now on."""
        self.stream = SimPairStream(self.owner, self.reader, self.layout)
        return self.stream

    def content(self, block_id: int, region: int = 0) -> tuple[int, ...]:
        """Return what a block of the owner holds at first."""
        return tuple(1000 * (region + 1) + 10 * block_id + slot for slot in range(self.layout.block_size_tokens))

    def source(self, block_ids: Sequence[int], region: int = 0) -> KvDescriptor:
        """Return the descriptor of blocks in a region of the owner."""
        return KvDescriptor(memory=self.owner.backend.memory[region], block_ids=tuple(block_ids))

    def start(self, blocks: dict[int, int], region: int = 0) -> ReadId:
        """Start a read that the owner is not told of. `blocks` maps the owner's block ids to the reader's."""
        read_id = ReadId(next(self._read_ids))
        self.reader.backend.start_read(read_id, self.source(tuple(blocks), region), tuple(blocks.values()))
        return read_id

    def start_granted(self, blocks: dict[int, int], region: int = 0) -> ReadId:
        """Start a read and announce it to the owner."""
        read_id = self.start(blocks, region)
        if self.reader.backend.is_two_sided(self.owner.backend.memory[0]):
            begin = NUM_BLOCKS * region
            self.stream.expect_read(read_id, [begin + block_id for block_id in blocks])
        return read_id

    def start_probe(self, block_id: int = 0) -> ReadId:
        """Start a probe that the owner is not told of."""
        read_id = ReadId(next(self._read_ids))
        self.reader.backend.start_probe(read_id, self.source((block_id,)))
        return read_id

    async def state(self, read_id: ReadId) -> ReadState:
        """Wait until a read is terminal, and release it."""
        state = await self.reader.backend.wait_ended(read_id)
        self.reader.backend.release(read_id)
        return state

    async def read(self, blocks: dict[int, int], region: int = 0) -> ReadState:
        """Read blocks of the owner."""
        return await self.state(self.start_granted(blocks, region))

    async def entries(self, *block_ids: int, region: int = 0) -> tuple[GenerationEntry, ...] | None:
        """Return the entries that validate reads of blocks; None if they cannot be read."""
        read_id, backend = ReadId(next(self._read_ids)), self.reader.backend
        backend.start_read_generations(read_id, self.source(block_ids, region), None)
        state = await backend.wait(read_id)
        entries = backend.generations(read_id) if state is ReadState.DONE else None
        backend.release(read_id)
        return entries

    def is_running(self, *read_ids: ReadId) -> bool:
        """True if none of the reads is terminal."""
        return all(self.reader.backend.poll(read_id) is ReadState.RUNNING for read_id in read_ids)

    def received(self, *own: int) -> list[tuple[int, ...]]:
        """Return the content of the reader's blocks."""
        return [self.reader.memory.block(block_id) for block_id in own]

    async def aclose(self) -> None:
        """Close both backends."""
        for each in (self.reader, self.owner):
            await each.backend.aclose()
            each.backend.kill()
