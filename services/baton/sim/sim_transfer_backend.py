"""Simulated KV transfers: reads take virtual time block by block, and may get stuck and write late.

A read sees the owner's memory as it is at that moment, even if a block is being reused. It goes on while its
reader's process is paused, and makes no progress between two partitioned workers.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from baton.core.errors import LayoutMismatch
from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_streams import NETWORK
from baton.sim.sim_tier import REUSED, SimTierMemory
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable

_Source = tuple[str, int]
"""Agent name of an owner and one of its block ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """Timing of reads.

    latency_s: delay before the first byte.
    connect_s: further delay of the first read of a pair.
    bytes_per_s: speed.
    stuck: probability that a read stops at some block and continues only after `stuck_s`.
    reused: probability that the owner reuses a block under a read, although the block is leased, and fills it
        again with the same content. The read gets wrong content, which only the block's generation shows.
    reused_reloads: the same probability for each block that a worker reloads from its host tier.
    """

    latency_s: float = 0.000_05
    connect_s: float = 0.0
    bytes_per_s: float = 4e9
    stuck: float = 0.0
    stuck_s: float = 20.0
    reused: float = 0.0
    reused_reloads: float = 0.0


@dataclass(kw_only=True)
class _Host:
    memory: SimMemory
    generations: MemoryGenerationTable
    is_alive: bool = True


class SimFabric:
    """The memories of all workers of a cluster, by agent name.

    pairs: (reader, owner) agent names between which KV was read.
    """

    def __init__(self, rng: Random, link: LinkModel) -> None:
        self.rng = rng
        self.link = link
        self.pairs: set[tuple[str, str]] = set()
        self._hosts: dict[str, _Host] = {}
        self._partitions: set[frozenset[str]] = set()
        self._unreadable: set[str] = set()
        self.num_settled = 0
        self._changed = asyncio.Event()

    def draws_reuse(self) -> bool:
        """Return True if a slot of a host tier is reused under a reload."""
        probability = self.link.reused_reloads
        return bool(probability) and self.rng.random() < probability

    def settle(self) -> None:
        """Let no block count as reused any more. Call it when no read is under way.

        A reader that is cancelled never reads the entry of a reused block.
        """
        self.num_settled += 1

    def partition(self, first: str, second: str) -> None:
        """Stop all reads between two workers, given by id, until `heal`."""
        self._partitions.add(frozenset((first, second)))

    def heal(self, first: str, second: str) -> None:
        """Let reads between two workers go on."""
        self._partitions.discard(frozenset((first, second)))
        self._wake()

    def block_reads_of(self, owner: str) -> None:
        """Stop all reads of a worker's memory, because its paused process takes part in them."""
        self._unreadable.add(owner)

    def allow_reads_of(self, owner: str) -> None:
        """Let reads of a worker's memory go on."""
        self._unreadable.discard(owner)
        self._wake()

    async def passable(self, reader: str, owner: str) -> None:
        """Wait until bytes pass from `owner` to `reader`."""
        while owner in self._unreadable or (self._partitions and frozenset((reader, owner)) in self._partitions):
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def add(self, agent_name: str, memory: SimMemory, generations: MemoryGenerationTable) -> None:
        """Register the memory of a worker."""
        self._hosts[agent_name] = _Host(memory=memory, generations=generations)

    def kill(self, agent_name: str) -> None:
        """Make all reads of this memory fail, including those under way, as if its process had died."""
        self._hosts[agent_name].is_alive = False

    def find(self, agent_name: str) -> _Host | None:
        """Return the memory of a living worker, or None."""
        host = self._hosts.get(agent_name)
        return host if host is not None and host.is_alive else None


@dataclass(kw_only=True)
class _SimRead:
    task: asyncio.Task[ReadState]
    entries: list[GenerationEntry] = field(default_factory=list)


class SimTransferBackend:
    """Implements `TransferBackend` between `SimMemory` instances."""

    two_sided = False
    max_probe_blocks = 1
    failure: BaseException | None = None

    def __init__(
        self,
        *,
        fabric: SimFabric,
        worker: WorkerRef,
        layout: KvLayout,
        memory: SimMemory,
        generations: MemoryGenerationTable,
        tier: SimTierMemory | None = None,
    ) -> None:
        """`tier`: a second region that peers may read."""
        self._fabric = fabric
        self._layout = layout
        self._own = memory
        self._peers: dict[str, KvMemory] = {}
        self._read_from: set[str] = set()
        self._reads: dict[ReadId, _SimRead] = {}
        self._unvalidated: Counter[_Source] = Counter()  # reads whose entries were not read yet
        self._reused: dict[_Source, int] = {}  # `num_settled` then; until all reads of the block have its entry
        self._memory = KvMemory(
            owner=worker,
            agent_name=f"sim-{worker}",
            agent_metadata=b"",
            memory_kind="host",
            device_id=0,
            base_address=0,
            block_stride_bytes=layout.block_bytes,
            num_blocks=memory.num_blocks,
            generation_table_address=0,
            generation_entry_bytes=ENTRY_BYTES,
        )
        fabric.add(self._memory.agent_name, memory, generations)
        self.memory: tuple[KvMemory, ...] = (self._memory,)
        if tier is not None:
            name = f"{self._memory.agent_name}-tier"
            self.memory += (replace(self._memory, agent_name=name, num_blocks=tier.memory.num_blocks),)
            fabric.add(name, tier.memory, tier.generations)

    def kill(self) -> None:
        """Make all reads of this worker's memory fail, as if its process had died."""
        for region in self.memory:
            self._fabric.kill(region.agent_name)

    def connect(self, peer: KvMemory, layout: KvLayout) -> None:
        if difference := self._layout.mismatch(layout):
            raise LayoutMismatch(difference)
        self._peers[peer.agent_name] = peer

    def forget(self, peer: KvMemory) -> None:
        self._peers.pop(peer.agent_name, None)
        self._read_from.discard(peer.agent_name)

    def transport_to(self, peer: KvMemory) -> str:
        return "simulated"

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        return KvDescriptor(memory=self._memory, block_ids=tuple(block_ids))

    def offer(self, block_ids: Sequence[int]) -> None:
        """Do nothing: peers read the blocks without the owner."""

    def expect_read(self, read_id: ReadId, reader: WorkerRef, block_ids: Sequence[int]) -> None:
        """Do nothing: reads are one-sided."""

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        self._start(read_id, source, list(block_ids))

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._start(read_id, source, [None] * len(source.block_ids))

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._reads[read_id] = _SimRead(task=_start(self._read_generations(read_id, source)))

    def poll(self, read_id: ReadId) -> ReadState:
        task = self._reads[read_id].task
        return task.result() if task.done() else ReadState.RUNNING

    async def wait(self, read_id: ReadId) -> ReadState:
        return await asyncio.shield(self._reads[read_id].task)

    async def wait_ended(self, read_id: ReadId) -> ReadState:
        return await self.wait(read_id)

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        return tuple(self._reads[read_id].entries)

    def release(self, read_id: ReadId) -> None:
        if self.poll(read_id) is ReadState.RUNNING:
            raise ValueError(f"read {read_id} is still running")
        del self._reads[read_id]

    async def aclose(self) -> None:
        tasks = [read.task for read in self._reads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, read_id: ReadId, source: KvDescriptor, destinations: Sequence[int | None]) -> None:
        self._reads[read_id] = _SimRead(task=_start(self._read(source, destinations)))

    async def _read(self, source: KvDescriptor, destinations: Sequence[int | None]) -> ReadState:
        link, rng = self._fabric.link, self._fabric.rng
        stuck_at = rng.randrange(len(destinations)) if rng.random() < link.stuck else -1
        await asyncio.sleep(link.latency_s)
        if source.memory.agent_name not in self._read_from:
            self._read_from.add(source.memory.agent_name)
            await asyncio.sleep(link.connect_s)
        for index, (source_block, destination) in enumerate(zip(source.block_ids, destinations, strict=True)):
            await asyncio.sleep(
                self._layout.block_bytes / link.bytes_per_s + (link.stuck_s if index == stuck_at else 0.0)
            )
            await self._fabric.passable(self._memory.owner.worker_id, source.memory.owner.worker_id)
            host = self._fabric.find(source.memory.agent_name)
            if host is None:
                return ReadState.FAILED
            if destination is not None:
                key = (source.memory.agent_name, source_block)
                self._unvalidated[key] += 1
                self._fabric.pairs.add((self._memory.agent_name, source.memory.agent_name))
                content = host.memory.block(source_block)
                if link.reused and rng.random() < link.reused:
                    self._reused[key] = self._fabric.num_settled
                    content = (REUSED,) * len(content)
                self._own.write_block(destination, content)
        return ReadState.DONE

    async def _read_generations(self, read_id: ReadId, source: KvDescriptor) -> ReadState:
        await asyncio.sleep(self._fabric.link.latency_s)
        await self._fabric.passable(self._memory.owner.worker_id, source.memory.owner.worker_id)
        host = self._fabric.find(source.memory.agent_name)
        if host is None:
            return ReadState.FAILED
        self._reads[read_id].entries += [
            self._entry(host, source.memory.agent_name, block_id) for block_id in source.block_ids
        ]
        return ReadState.DONE

    def _entry(self, host: _Host, agent_name: str, block_id: int) -> GenerationEntry:
        """Return the entry as a reader sees it: of the next generation if the block was reused under a read.

        Reads of one block overlap, and any of them may have the new content, so all of them see it.
        """
        entry, key = host.generations.entry(block_id), (agent_name, block_id)
        self._unvalidated[key] -= 1
        is_reused = self._reused.get(key) == self._fabric.num_settled
        if self._unvalidated[key] <= 0:
            del self._unvalidated[key]
            self._reused.pop(key, None)
        return replace(entry, generation=entry.generation + 1) if is_reused else entry


def _start(read: Coroutine[Any, Any, ReadState]) -> asyncio.Task[ReadState]:
    """Run a read outside of any process, as a network card does."""
    return asyncio.get_running_loop().create_task(read, context=NETWORK.copy())
