"""Simulated KV transfers: reads take virtual time block by block, and may get stuck and write late.

A read sees the owner's memory as it is at that moment, even if a block is being reused. It makes no progress
between two partitioned workers. A one-sided read goes on while its reader's process is paused. A two-sided
one begins when the owner has granted it, and both processes must run.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from baton.core.errors import LayoutMismatch
from baton.core.ids import ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage
from baton.sim.sim_groups import Destinations, Entries, GroupedRead, SimGroups
from baton.sim.sim_memory import SimMemory
from baton.sim.sim_streams import start_in_network
from baton.sim.sim_tier import REUSED, SimTierMemory
from baton.sim.sim_two_sided import SimGroupReader, SimReadServer, agent_name_of
from baton.transfer.backend import (
    GenerationEntry,
    KvDescriptor,
    NoReadServer,
    ReadServer,
    ReadState,
    SendGroup,
    drop_message,
)
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable

TRANSFER = "simulated"
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
    failed: probability that a read fails at some block. A two-sided one ends its group.
    """

    latency_s: float = 0.000_05
    connect_s: float = 0.0
    bytes_per_s: float = 4e9
    stuck: float = 0.0
    stuck_s: float = 20.0
    reused: float = 0.0
    reused_reloads: float = 0.0
    failed: float = 0.0


@dataclass(kw_only=True)
class _Host:
    memory: SimMemory
    generations: MemoryGenerationTable
    is_alive: bool = True


class SimFabric:
    """The memories of all workers of a cluster, by agent name.

    pairs: (reader, owner) agent names between which KV was read.
    groups: those of two-sided reads.
    """

    def __init__(self, rng: Random, link: LinkModel) -> None:
        self.rng = rng
        self.link = link
        self.pairs: set[tuple[str, str]] = set()
        self.groups = SimGroups()
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
        """Stop all reads of a worker's memory, and its own two-sided ones, because its paused process takes
        part in them."""
        self._unreadable.add(owner)

    def allow_reads_of(self, owner: str) -> None:
        """Let reads go on that `block_reads_of` has stopped."""
        self._unreadable.discard(owner)
        self._wake()

    async def passable(self, reader: str, owner: str, *, two_sided: bool = False) -> None:
        """Wait until bytes pass from `owner` to `reader`. For two-sided reads, the reader must run, too."""
        while (
            owner in self._unreadable
            or (two_sided and reader in self._unreadable)
            or (self._partitions and frozenset((reader, owner)) in self._partitions)
        ):
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def add(self, agent_name: str, memory: SimMemory, generations: MemoryGenerationTable) -> None:
        """Register the memory of a worker."""
        self._hosts[agent_name] = _Host(memory=memory, generations=generations)

    def kill(self, agent_name: str) -> None:
        """Make all reads of this memory fail, including those under way, as if its process had died.

        Its two-sided reads fail, too.
        """
        self._hosts[agent_name].is_alive = False
        self.groups.kill(agent_name)

    def find(self, agent_name: str) -> _Host | None:
        """Return the memory of a living worker, or None."""
        host = self._hosts.get(agent_name)
        return host if host is not None and host.is_alive else None


@dataclass(kw_only=True)
class _SimRead:
    ended: asyncio.Future[ReadState]
    entries: list[GenerationEntry] = field(default_factory=list)


class _ReusedBlocks:
    """The blocks that were reused under a read, until all reads of them have their entries."""

    def __init__(self, fabric: SimFabric) -> None:
        self._fabric = fabric
        self._unvalidated: Counter[_Source] = Counter()  # reads whose entries were not seen yet
        self._reused: dict[_Source, int] = {}  # `num_settled` then

    def copied(self, source: _Source, *, is_reused: bool) -> None:
        """Count a copy of a block, whose entry is to be seen."""
        self._unvalidated[source] += 1
        if is_reused:
            self._reused[source] = self._fabric.num_settled

    def seen(self, source: KvDescriptor, entries: Sequence[GenerationEntry]) -> list[GenerationEntry]:
        """Return entries as a reader sees them: of the next generation if the block was reused under a read.

        Reads of one block overlap, and any of them may have the new content, so all of them see it.
        """
        return [
            self._entry((source.memory.agent_name, block_id), entry)
            for block_id, entry in zip(source.block_ids, entries, strict=True)
        ]

    def forget(self, source: _Source) -> None:
        """Handle that the entry of a copy was seen, or never will be because its read has failed."""
        self._unvalidated[source] -= 1
        if self._unvalidated[source] <= 0:
            del self._unvalidated[source]
            self._reused.pop(source, None)

    def _entry(self, source: _Source, entry: GenerationEntry) -> GenerationEntry:
        is_reused = self._reused.get(source) == self._fabric.num_settled
        self.forget(source)
        return replace(entry, generation=entry.generation + 1) if is_reused else entry


class SimTransferBackend:
    """Implements `TransferBackend` between `SimMemory` instances."""

    transfers = (TRANSFER,)
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
        two_sided: bool = False,
    ) -> None:
        """tier: a second region that peers may read

        two_sided: owners take part in reads. All workers of a fabric must have the same value
        """
        self._fabric = fabric
        self._layout = layout
        self._own = memory
        self._read_from: set[str] = set()
        self._reads: dict[ReadId, _SimRead] = {}
        self._reused = _ReusedBlocks(fabric)
        self._memory = KvMemory(
            owner=worker,
            agent_name=agent_name_of(worker),
            agent_metadata=b"",
            memory_kind="host",
            device_id=0,
            base_address=0,
            block_stride_bytes=layout.block_bytes,
            num_blocks=memory.num_blocks,
            generation_table_address=0,
            generation_entry_bytes=ENTRY_BYTES,
            transfer=TRANSFER,
        )
        self.num_blocks = memory.num_blocks
        fabric.add(self._memory.agent_name, memory, generations)
        self.memory: tuple[KvMemory, ...] = (self._memory,)
        if tier is not None:
            name = f"{self._memory.agent_name}-tier"
            self.memory += (replace(self._memory, agent_name=name, num_blocks=tier.memory.num_blocks),)
            fabric.add(name, tier.memory, tier.generations)
        self._groups: SimGroupReader | None = None
        if two_sided:
            self._groups = SimGroupReader(
                worker, fabric.groups, copy_blocks=self._read_granted, passable=self._passable
            )

    def kill(self) -> None:
        """Make all reads of this worker's memory fail, as if its process had died."""
        for region in self.memory:
            self._fabric.kill(region.agent_name)

    def is_two_sided(self, peer: KvMemory) -> bool:
        return self._groups is not None

    def connect(self, peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
        if difference := self._layout.mismatch(layout):
            raise LayoutMismatch(difference)
        if self._groups is not None:
            self._groups.connect(peer, send)

    def receive(self, peer: KvMemory, message: GroupMessage) -> None:
        if self._groups is not None:
            self._groups.receive(peer, message)

    def serve(self, reader: WorkerRef, send: SendGroup) -> ReadServer:
        if self._groups is None:
            return NoReadServer()
        return SimReadServer(self._fabric.groups, self.memory, send)

    def forget(self, peer: KvMemory) -> None:
        self._read_from.discard(peer.agent_name)
        if self._groups is not None:
            self._groups.forget(peer)

    def transport_to(self, peer: KvMemory) -> str:
        return "simulated"

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        return KvDescriptor(memory=self._memory, block_ids=tuple(block_ids))

    def offer(self, block_ids: Sequence[int]) -> None:
        """Do nothing: blocks are read as they are."""

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        self._start(read_id, source, list(block_ids))

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._start(read_id, source, [None] * len(source.block_ids))

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor, payload: ReadId | None) -> None:
        if self._groups is None:
            self._reads[read_id] = _SimRead(ended=start_in_network(self._read_generations(read_id, source)))
            return
        entries = self._groups.entries(source)
        read = self._reads[read_id] = _SimRead(ended=asyncio.get_running_loop().create_future())
        if entries is not None:
            read.entries += self._reused.seen(source, entries)
        read.ended.set_result(ReadState.LOST if entries is None else ReadState.DONE)

    def poll(self, read_id: ReadId) -> ReadState:
        ended = self._reads[read_id].ended
        return ended.result() if ended.done() else ReadState.RUNNING

    async def wait(self, read_id: ReadId) -> ReadState:
        return await asyncio.shield(self._reads[read_id].ended)

    async def wait_ended(self, read_id: ReadId) -> ReadState:
        return await self.wait(read_id)

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        return tuple(self._reads[read_id].entries)

    def release(self, read_id: ReadId) -> None:
        if self.poll(read_id) is ReadState.RUNNING:
            raise ValueError(f"read {read_id} is still running")
        del self._reads[read_id]

    async def aclose(self) -> None:
        tasks: list[asyncio.Future[Any]] = [] if self._groups is None else [*self._groups.close()]
        tasks += [read.ended for read in self._reads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, read_id: ReadId, source: KvDescriptor, destinations: Destinations) -> None:
        if self._groups is None:
            self._reads[read_id] = _SimRead(ended=start_in_network(self._read(source, destinations)))
            return
        read = self._reads[read_id] = _SimRead(ended=asyncio.get_running_loop().create_future())
        self._groups.start(GroupedRead(read_id=read_id, source=source, destinations=destinations, ended=read.ended))

    async def _passable(self, owner: WorkerRef) -> None:
        is_two_sided = self._groups is not None
        await self._fabric.passable(self._memory.owner.worker_id, owner.worker_id, two_sided=is_two_sided)

    async def _read(self, source: KvDescriptor, destinations: Destinations) -> ReadState:
        link, rng, name = self._fabric.link, self._fabric.rng, source.memory.agent_name
        stuck_at = rng.randrange(len(destinations)) if rng.random() < link.stuck else -1
        fails_at = rng.randrange(len(destinations)) if link.failed and rng.random() < link.failed else -1
        await asyncio.sleep(link.latency_s)
        if name not in self._read_from:
            self._read_from.add(name)
            await asyncio.sleep(link.connect_s)
        copied: list[_Source] = []
        try:
            for index, (source_block, destination) in enumerate(zip(source.block_ids, destinations, strict=True)):
                stuck_s = link.stuck_s if index == stuck_at else 0.0
                await asyncio.sleep(self._layout.block_bytes / link.bytes_per_s + stuck_s)
                await self._passable(source.memory.owner)
                host = self._fabric.find(name)
                if host is None or index == fails_at:
                    return ReadState.FAILED
                if destination is not None:
                    self._fabric.pairs.add((self._memory.agent_name, name))
                    content = host.memory.block(source_block)
                    is_reused = bool(link.reused) and rng.random() < link.reused
                    copied.append((name, source_block))
                    self._reused.copied(copied[-1], is_reused=is_reused)
                    self._own.write_block(destination, (REUSED,) * len(content) if is_reused else content)
            copied.clear()  # their entries are to be seen
            return ReadState.DONE
        finally:
            for each in copied:
                self._reused.forget(each)

    async def _read_granted(self, source: KvDescriptor, destinations: Destinations) -> Entries | None:
        """Copy blocks that the owner has granted, and return their entries as they are after the copy."""
        state = await self._read(source, destinations)
        host = self._fabric.find(source.memory.agent_name)
        if state is not ReadState.DONE or host is None:
            return None
        return tuple(host.generations.entry(block_id) for block_id in source.block_ids)

    async def _read_generations(self, read_id: ReadId, source: KvDescriptor) -> ReadState:
        await asyncio.sleep(self._fabric.link.latency_s)
        await self._passable(source.memory.owner)
        host = self._fabric.find(source.memory.agent_name)
        if host is None:
            return ReadState.FAILED
        entries = [host.generations.entry(block_id) for block_id in source.block_ids]
        self._reads[read_id].entries += self._reused.seen(source, entries)
        return ReadState.DONE
