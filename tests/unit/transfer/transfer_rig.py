"""Runs an owner and a reader in one process, in virtual time. A test can stop, tear and corrupt reads."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from baton.core.errors import LayoutMismatch, Reason
from baton.core.ids import JobId, ReadId, WorkerRef
from baton.core.interfaces import Duplex
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import FirstToken, GroupMessage, OwnerMessage, ReaderMessage
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.tiers.kv_tier import BlockToStore
from baton.engine.tiers.slots import TierSlots
from baton.runtime.network.in_process_network import InProcessNetwork
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState, SendGroup, drop_message
from baton.transfer.backends.read_table import TrackedReads
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.transfer.owner.owner_service import OwnerService
from baton.transfer.reader.kv_reader import KvReader
from baton.transfer.reader.peer_reads import ReaderTimes
from baton.transfer.reader.pull import Pull
from baton.worker.tiers.worker_regions import WorkerRegions
from tests import builders

NUM_BLOCKS = 64
NUM_SLOTS = 16
LEASE_S = 2.0
REORDER_WINDOW_S = 0.5
CLAIM_TIMEOUT_S = 2.0
RENEW_S = 0.2
DEADLINE_MIN_S, DEADLINE_MAX_S = 0.5, 3.0
READ_S = 0.01
OWNER = builders.worker_ref("p0", epoch=7)
READER = builders.worker_ref("d0", epoch=8)
EMPTY = ""


@dataclass
class Fabric:
    """Block contents of both sides, offered blocks, and the behaviour of reads.

    reads_may_end: reads of blocks end only while it is set
    generation_reads_may_end: the same for generation-table entries
    failing: reads end FAILED
    num_to_lose: so many reads of blocks end LOST
    read_s: duration of a read of blocks or a probe
    in_doubt: reads of blocks fail without having ended, and end when `doubts_may_end` is set
    probes_in_doubt: the same for probes
    mid_read_fault: called in the middle of each read of blocks
    seen_entry: returns what the reader sees of a block's generation-table entry
    """

    blocks: dict[str, list[str]] = field(default_factory=dict)
    offered: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    tables: dict[str, MemoryGenerationTable] = field(default_factory=dict)
    reads_may_end: asyncio.Event = field(default_factory=asyncio.Event)
    generation_reads_may_end: asyncio.Event = field(default_factory=asyncio.Event)
    failing: bool = False
    num_to_lose: int = 0
    read_s: float = READ_S
    in_doubt: bool = False
    probes_in_doubt: bool = False
    doubts_may_end: asyncio.Event = field(default_factory=asyncio.Event)
    mid_read_fault: Callable[[], None] | None = None
    seen_entry: Callable[[int, GenerationEntry], GenerationEntry] = lambda block_id, entry: entry
    reads: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    probes: int = 0
    running: int = 0
    most_running_blocks: int = 0
    running_blocks: int = 0

    def __post_init__(self) -> None:
        self.reads_may_end.set()
        self.generation_reads_may_end.set()


class FakeServer:
    """The owner's part in the reads of one stream; notes what it is told."""

    def __init__(self, backend: "FakeBackend", reader: WorkerRef, send: SendGroup) -> None:
        self._backend, self._reader = backend, reader
        self.send = send
        self.received: list[GroupMessage] = []
        self.refused: list[tuple[int, int]] = []
        self.is_closed = False

    def receive(self, message: GroupMessage) -> None:
        self.received.append(message)

    def expect_read(self, read_id: ReadId, block_ids: Sequence[int]) -> None:
        self._backend.expected.append((read_id, self._reader.worker_id, tuple(block_ids)))

    def refuse_read(self, read_id: ReadId, num_blocks: int) -> None:
        self.refused.append((read_id, num_blocks))

    def close(self) -> None:
        self.is_closed = True


class FakeBackend(TrackedReads):
    """Implements `TransferBackend` over a Fabric.

    A read of a block copies the content at the end of the read.
    """

    max_probe_blocks = 1
    failure: BaseException | None = None

    def __init__(
        self,
        fabric: Fabric,
        worker: WorkerRef,
        layout: KvLayout,
        table: MemoryGenerationTable,
        *,
        two_sided: bool = False,
        tier: MemoryGenerationTable | None = None,
        transfer: str = "fake",
    ) -> None:
        """`tier`: the generation table of a second region, whose blocks need not be offered."""
        super().__init__()
        self._two_sided = two_sided
        self._fabric, self._layout, self._worker = fabric, layout, worker
        self._tasks: set[asyncio.Task[None]] = set()
        self.expected: list[tuple[int, str, tuple[int, ...]]] = []
        self.forgotten: list[str] = []
        self.received: list[GroupMessage] = []
        self.servers: list[FakeServer] = []
        self.send_group: SendGroup = drop_message
        fabric.blocks[worker.worker_id] = [EMPTY] * NUM_BLOCKS
        fabric.tables[worker.worker_id] = table
        self._memory = KvMemory(
            owner=worker,
            agent_name=worker.worker_id,
            agent_metadata=b"",
            memory_kind="host",
            device_id=0,
            base_address=0,
            block_stride_bytes=layout.block_bytes,
            num_blocks=NUM_BLOCKS,
            generation_table_address=0,
            generation_entry_bytes=ENTRY_BYTES,
            transfer=transfer,
        )
        self.num_blocks = NUM_BLOCKS
        self.transfers = (transfer,)
        self.memory: tuple[KvMemory, ...] = (self._memory,)
        if tier is not None:
            name = f"{worker.worker_id}-tier"
            fabric.blocks[name], fabric.tables[name] = [EMPTY] * tier.num_blocks, tier
            fabric.offered[name].update(range(tier.num_blocks))
            self.memory += (replace(self._memory, agent_name=name, num_blocks=tier.num_blocks),)

    def is_two_sided(self, peer: KvMemory) -> bool:
        return self._two_sided

    def receive(self, peer: KvMemory, message: GroupMessage) -> None:
        self.received.append(message)

    def serve(self, reader: WorkerRef, send: SendGroup) -> "FakeServer":
        self.servers.append(FakeServer(self, reader, send))
        return self.servers[-1]

    def connect(self, peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
        self.send_group = send
        if mismatch := self._layout.mismatch(layout):
            raise LayoutMismatch(mismatch)

    def forget(self, peer: KvMemory) -> None:
        self.forgotten.append(str(peer.owner))

    def transport_to(self, peer: KvMemory) -> str:
        return self.transfers[0]

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        return KvDescriptor(memory=self._memory, block_ids=tuple(block_ids))

    def offer(self, block_ids: Sequence[int]) -> None:
        self._fabric.offered[self._worker.worker_id].update(block_ids)

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        assert set(source.block_ids) <= self._fabric.offered[source.memory.agent_name], (
            "announced before it was offered"
        )
        self._fabric.reads.append((source.block_ids, tuple(block_ids)))
        self._start(read_id, self._copy(read_id, source, tuple(block_ids)))

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._fabric.probes += 1
        self._start(read_id, self._copy(read_id, source, None))

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor, payload: ReadId | None) -> None:
        self._start(read_id, self._copy_generations(read_id, source))

    async def aclose(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, read_id: ReadId, work: Any) -> None:
        self._reads.begin(read_id)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _copy(self, read_id: ReadId, source: KvDescriptor, own: tuple[int, ...] | None) -> None:
        fabric, count = self._fabric, len(source.block_ids) if own is not None else 0
        fabric.running += 1
        fabric.running_blocks += count
        fabric.most_running_blocks = max(fabric.most_running_blocks, fabric.running_blocks)
        await asyncio.sleep(fabric.read_s / 2)
        if own is not None and fabric.mid_read_fault is not None:
            fabric.mid_read_fault()
        if fabric.probes_in_doubt if own is None else fabric.in_doubt:
            self._reads.end(read_id, ReadState.IN_DOUBT)
            await fabric.doubts_may_end.wait()
        await fabric.reads_may_end.wait()
        await asyncio.sleep(fabric.read_s / 2)
        fabric.running -= 1
        fabric.running_blocks -= count
        theirs, ours = fabric.blocks[source.memory.agent_name], fabric.blocks[self._worker.worker_id]
        if own is not None and fabric.num_to_lose:
            fabric.num_to_lose -= 1
            self._reads.end(read_id, ReadState.LOST)
            return
        if own is not None and not fabric.failing:
            for source_block, own_block in zip(source.block_ids, own, strict=True):
                ours[own_block] = theirs[source_block]
        self._reads.end(read_id, ReadState.FAILED if fabric.failing else ReadState.DONE)

    async def _copy_generations(self, read_id: ReadId, source: KvDescriptor) -> None:
        await self._fabric.generation_reads_may_end.wait()
        await asyncio.sleep(READ_S / 10)
        table = self._fabric.tables[source.memory.agent_name]
        entries = tuple(self._fabric.seen_entry(block_id, table.entry(block_id)) for block_id in source.block_ids)
        self._reads.end(read_id, ReadState.DONE, entries)


@dataclass
class Observed:
    """A TransferObserver that records its calls."""

    ended: list[Reason | None] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    quarantined_blocks: list[int] = field(default_factory=list)
    broken: list[bool] = field(default_factory=list)
    refused: list[bool] = field(default_factory=list)
    measured: list[dict[str, float]] = field(default_factory=list)

    def pull_ended(
        self, owner: WorkerRef, *, reason: Reason | None, transfer_bytes: int, duration_s: float, read_s: float
    ) -> None:
        self.ended.append(reason)

    def validation_failed(self, owner: WorkerRef, what: str) -> None:
        self.mismatches.append(what)

    def blocks_quarantined(self, owner: WorkerRef, num_blocks: int) -> None:
        self.quarantined_blocks.append(num_blocks)

    def link_changed(
        self, owner: WorkerRef, *, transport: str, bytes_per_s: float, broken: bool, refused: bool
    ) -> None:
        self.broken.append(broken)
        self.refused.append(refused)

    def backends_measured(self, owner: WorkerRef, bytes_per_s: Mapping[str, float]) -> None:
        self.measured.append(dict(bytes_per_s))


@dataclass(kw_only=True)
class Host:
    """Memory and pool of one worker."""

    worker: WorkerRef
    backend: FakeBackend
    pool: BlockPool
    contents: list[str]

    def compute(self, text: str, hashes: Sequence[BlockHash], num_blocks: int) -> list[int]:
        """Allocate blocks as a prefill leaves them: content `text:index`, full ones hashed."""
        block_ids = self.pool.allocate(num_blocks)
        assert block_ids is not None
        for index, block_id in enumerate(block_ids):
            self.contents[block_id] = f"{text}:{index}"
            if index < len(hashes):
                self.pool.set_hash(block_id, hashes[index])
        return block_ids

    def reuse_everything_free(self, text: str) -> None:
        """Reuse every free block: it gets a new generation and other content."""
        taken = self.pool.allocate(self.pool.num_allocatable) or []
        for block_id in taken:
            self.contents[block_id] = text
        self.pool.unref(taken)

    def visible(self) -> set[str]:
        """Return the contents that an engine or prefix cache could use as KV."""
        return {self.contents[b] for b in range(NUM_BLOCKS) if self.pool.hash_of(b) != NO_HASH or (self.is_seen(b))}

    def is_seen(self, block_id: int) -> bool:
        return self.pool.num_refs(block_id) > 0 and self.pool.is_readable(block_id)


class PeerEnd:
    """The peer side of a WorkerService. `silent` swallows streams; `cut` breaks those that are open."""

    def __init__(self, service: OwnerService) -> None:
        self.service = service
        self.num_streams = 0

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        self.num_streams += 1
        await self.service.serve(stream)

    async def session(self, stream: Any) -> None:
        raise NotImplementedError

    async def copy_prefix(self, stream: Any) -> None:
        raise NotImplementedError


@dataclass(kw_only=True)
class Rig:
    fabric: Fabric
    owner: Host
    reader: Host
    slots: TierSlots
    service: OwnerService
    end: PeerEnd
    kv_reader: KvReader
    network: InProcessNetwork
    observed: Observed

    def hashes(self, text: str, count: int) -> tuple[BlockHash, ...]:
        return builders.hashes_of([sum(text.encode())] * (count * builders.BLOCK_SIZE_TOKENS))

    def prefill(self, text: str = "a", num_tokens: int = 18, request: int = 0) -> tuple[JobId, list[int]]:
        """Compute a prompt at the owner and send its final announcement. Returns (job, its blocks)."""
        job = builders.job_id(request)
        hashes = self.hashes(text, num_tokens // builders.BLOCK_SIZE_TOKENS)
        self.service.create(job, READER)
        block_ids = self.owner.compute(text, hashes, -(-num_tokens // builders.BLOCK_SIZE_TOKENS))
        self.service.allocated(job, block_ids, hashes)
        self.service.announce(job, num_tokens, final=True, first_tokens=[FirstToken(sample_index=0, token_id=42)])
        self.owner.pool.unref(block_ids)  # the sequence is over; the transfer has its pins
        return job, block_ids

    def store_in_tier(self, text: str, hashes: Sequence[BlockHash]) -> list[int]:
        """Put blocks into the owner's tier, with content `text:tier:index`. Returns their slots."""
        blocks = [BlockToStore(block_id=0, block_hash=each) for each in hashes]
        slots = list(self.slots.begin_fill(blocks))
        for index, slot in enumerate(slots):
            self.fabric.blocks[f"{OWNER.worker_id}-tier"][slot] = f"{text}:tier:{index}"
        self.slots.end_fill(slots, is_complete=True)
        return slots

    def mark_received(self, pull: Pull, num_blocks: int, have_blocks: int = 0) -> dict[int, int]:
        """Give a pull receiving blocks for the rest of `num_blocks`. Returns them by index."""
        receiving = self.reader.pool.allocate_receiving(num_blocks - have_blocks)
        assert receiving is not None
        by_index = dict(enumerate(receiving, have_blocks))
        pull.receive_into(by_index, have_blocks)
        return by_index

    def release(self, receiving: dict[int, int]) -> None:
        """End the reader's sequence."""
        self.reader.pool.unref(list(receiving.values()))

    def check_nothing_leaks(self) -> None:
        for host in (self.owner, self.reader):
            host.pool.check()
            counts = host.pool.counts()
            assert counts.free + counts.cached == counts.total, counts
        self.slots.check()
        assert self.slots.counts().busy == 0
        assert self.service.open_leases == 0

    def cut(self) -> None:
        """Break every open stream. The owner accepts new ones immediately."""
        self.network.remove(OWNER.address)
        self.network.add_worker(OWNER.address, self.end)


def host(
    fabric: Fabric, worker: WorkerRef, *, two_sided: bool = False, tier: MemoryGenerationTable | None = None
) -> Host:
    table = MemoryGenerationTable(bytearray(NUM_BLOCKS * ENTRY_BYTES), worker.worker_epoch)
    backend = FakeBackend(fabric, worker, builders.layout(), table, two_sided=two_sided, tier=tier)
    pool = BlockPool(NUM_BLOCKS, builders.BLOCK_SIZE_TOKENS, table)
    return Host(worker=worker, backend=backend, pool=pool, contents=fabric.blocks[worker.worker_id])


def owner_service(of: Host, **changes: Any) -> OwnerService:
    settings: dict[str, Any] = {
        "lease_s": LEASE_S,
        "claim_timeout_s": CLAIM_TIMEOUT_S,
        "reorder_window_s": REORDER_WINDOW_S,
        "layout": builders.layout(),
    }
    settings |= {"pins": of.pool, "lookup": of.pool.lookup}
    return OwnerService(worker=of.worker, backend=of.backend, **(settings | changes))


def times(**changes: float) -> ReaderTimes:
    settings: dict[str, Any] = {
        "lease_s": LEASE_S,
        "renew_s": RENEW_S,
        "deadline_min_s": DEADLINE_MIN_S,
        "deadline_max_s": DEADLINE_MAX_S,
        "hello_s": 1.0,
    }
    return ReaderTimes(**(settings | changes))


def kv_reader_of(
    of: Host,
    network: InProcessNetwork,
    observed: Observed,
    *,
    seed: int = 0,
    min_link_gbps: float = 0.0,
    not_available: Mapping[str, str] | None = None,
) -> KvReader:
    return KvReader(
        worker=of.worker,
        layout=builders.layout(),
        backend=of.backend,
        network=network,
        pool=of.pool,
        rng=Random(seed),
        times=times(),
        min_link_gbps=min_link_gbps,
        observer=observed,
        not_available=not_available,
    )


@asynccontextmanager
async def rig(*, two_sided: bool = False, seed: int = 0, min_link_gbps: float = 0.0) -> AsyncIterator[Rig]:
    fabric, observed, network = Fabric(), Observed(), InProcessNetwork()
    tier = MemoryGenerationTable(bytearray(NUM_SLOTS * ENTRY_BYTES), OWNER.worker_epoch)
    slots = TierSlots(NUM_SLOTS, tier)
    owner, reader = host(fabric, OWNER, two_sided=two_sided, tier=tier), host(fabric, READER, two_sided=two_sided)
    regions = WorkerRegions(owner.pool, slots)
    service = owner_service(owner, pins=regions, lookup=regions.lookup)
    end = PeerEnd(service)
    network.add_worker(OWNER.address, end)
    kv_reader = kv_reader_of(reader, network, observed, seed=seed, min_link_gbps=min_link_gbps)
    yield Rig(
        fabric=fabric,
        owner=owner,
        reader=reader,
        slots=slots,
        service=service,
        end=end,
        kv_reader=kv_reader,
        network=network,
        observed=observed,
    )
    await kv_reader.aclose()
    await service.aclose()
    await network.aclose()
    for side in (owner, reader):
        await side.backend.aclose()


def seen(contents: Iterable[str], text: str) -> set[str]:
    """Return those of `contents` that belong to `text`."""
    return {content for content in contents if content.startswith(text)}
