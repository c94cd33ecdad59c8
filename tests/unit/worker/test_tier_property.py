"""Pool, slower tiers, copies out, reloads and readers together, under random interleavings.

The content of a block is the hash of its tokens, so content under a wrong hash shows at once. The naive
model is the rule itself: whoever finds a block by hash, on the device, in a tier or as a peer, must see that
content.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from baton.core.kv.block_hash import NO_HASH
from baton.core.kv.kv_events import KvEventKind
from baton.core.kv.kv_tables import TableWindows, entries_from, hashes_of_entries
from baton.core.request import SessionHints
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.retention.content_owner import ContentOwner
from baton.engine.retention.content_owners import OwnedRequest
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.outcome import EngineOutcome, PreemptedSequence, ReturningSequence
from baton.engine.tiers.kv_tier import KvTier
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.transfer.integrity.validate_read import AnnouncedBlock, mismatch
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.disk.block_file import BlockFile
from baton.worker.disk.disk_format import FileShape
from baton.worker.tiers.copy_out import CopyOut
from baton.worker.tiers.copy_pacing import CopyPacing
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.host_tier import HostTier
from baton.worker.tiers.preempted_kv import PreemptedKv
from baton.worker.tiers.reloads import Reloads
from baton.worker.tiers.retention import Retention
from baton.worker.tiers.slower_tiers import SlowerTiers
from baton.worker.tiers.tier_copies import HostCopies
from baton.worker.tiers.warm_start import WarmStart
from baton.worker.tiers.worker_regions import WorkerRegions
from tests import builders
from tests.scale import sized

SIZE = 4
COSTS = StepCostModel.of((0.01, 0.001, 0.0, 0.0, 0.0, 0.0))
"""Computing a block takes far longer than a copy, so that every block is worth one."""
HASH_BYTES = len(NO_HASH)
MAX_BYTES_AT_DEATH = 200
"""Most bytes of writes that reach the disk after a kill: a few headers and payloads."""


class DeviceFailed(RuntimeError):
    """Injected."""


class RandomRunner:
    """A `CopyRunner` that copies some time after the call, returns some time after that, and sometimes
    fails."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.waiting: list[asyncio.Event] = []

    async def run(self, copy: Callable[[], None], num_bytes: int) -> float:
        await self._step()
        if self._rng.random() < 0.1:
            raise DeviceFailed
        copy()
        await self._step()
        return 1e-6

    def close(self) -> None:
        pass

    async def _step(self) -> None:
        event = asyncio.Event()
        self.waiting.append(event)
        await event.wait()


class MemoryFile:
    """A `RawFile` in memory, as one incarnation of the worker has it open.

    num_bytes_left: that still reach the disk, because the process is being killed; None while it lives
    """

    def __init__(self, content: bytearray) -> None:
        self.content = content
        self.num_bytes_left: int | None = None

    def read_into(self, buffer: Any, offset: int) -> None:
        view = memoryview(buffer).cast("B")
        view[:] = self.content[offset : offset + len(view)]

    def write(self, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")[: self.num_bytes_left]
        self.content[offset : offset + len(view)] = view
        if self.num_bytes_left is not None:
            self.num_bytes_left -= len(view)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class RandomDisk:
    """A `DiskRunner` as `RandomRunner`. A job that fails does so before it, so that the disk is as it was."""

    writes_busy_s = 0.0

    def __init__(self, runner: RandomRunner) -> None:
        self._runner = runner

    async def read(self, job: Callable[[], Any], num_bytes: int) -> Any:
        done: list[Any] = []
        await self._runner.run(lambda: done.append(job()), num_bytes)
        return done[0]

    write = read

    def close(self) -> None:
        pass


@dataclass(kw_only=True, eq=False)
class Read:
    """A peer's read under way: what was announced, and the content that it has read so far."""

    regions: WorkerRegions
    memory: dict[int, np.ndarray]
    entry: Callable[[int], object]
    announced: list[AnnouncedBlock]
    is_leased: bool = True
    seen: list[bytes] = field(default_factory=list)


class World:
    """One worker and its peers. Only public calls are made, as the worker makes them."""

    def __init__(self, seed: int, windows: tuple[int, ...], policy: str, *, has_disk: bool) -> None:
        self.rng = random.Random(seed)
        self.policy, self.now_s = policy, 0.0
        self.shape = FileShape(num_slots=24, block_bytes=HASH_BYTES, layout=b"l" * 16, model=b"m" * 16)
        self.file = MemoryFile(bytearray(self.shape.file_bytes)) if has_disk else None
        self.windows = TableWindows(windows, SIZE)
        self.tasks = BackgroundTasks(self.failed)
        self.errors: list[BaseException] = []
        self.epoch = 0
        self.withdrawn: set[bytes] = set()
        self.storing: list[asyncio.Task[None]] = []
        self.warm_starts: list[asyncio.Task[None]] = []
        self.calls: list[asyncio.Task[int]] = []
        self.reads: list[Read] = []
        self.sequences: list[tuple[list[int], OwnedRequest]] = []
        self.start()

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)

    def start(self) -> None:
        """Start the worker, or another incarnation of it after a crash. Both memories begin with rubbish."""
        self.epoch += 1
        num_blocks, num_slots = self.rng.randint(6, 16), self.rng.randint(4, 30)
        shape = HASH_BYTES
        self.device = np.full((num_blocks, shape), 255, dtype=np.uint8)
        self.host = np.full((num_slots, shape), 255, dtype=np.uint8)
        self.device_table = MemoryGenerationTable(bytearray(num_blocks * ENTRY_BYTES), self.epoch)
        self.host_table = MemoryGenerationTable(bytearray(num_slots * ENTRY_BYTES), self.epoch)
        self.pool = BlockPool(
            num_blocks, SIZE, self.device_table, self.windows, announce_every=self.rng.choice([1, 2, 4])
        )
        self.announced: set[tuple[KvTier, bytes]] = set()
        self.runner = RandomRunner(self.rng)
        self.tier = HostTier(
            worker=builders.worker_ref("w", epoch=self.epoch),
            num_slots=num_slots,
            block_bytes=shape,
            generations=self.host_table,
            copies=HostCopies(self.device, self.host),
            runner=self.runner,
        )
        config = EngineConfig(
            max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64, block_size_tokens=SIZE, eos_token_ids=()
        )
        self.engine = Engine(config, self.pool, clock=lambda: 0.0)
        self.disk = None if self.file is None else self.open_disk(self.file)
        self.tiers = [self.tier] if self.disk is None else [self.tier, self.disk]
        self.budget = self.rng.randint(0, 4)
        self.retention = Retention(
            self.pool,
            self.tier,
            policy=self.policy,
            retain_memory=self.budget * shape,
            block_bytes=shape,
            chunk_tokens=16,
            costs=lambda: COSTS,
            clock=lambda: self.now_s,
        )
        self.copies_out = [
            CopyOut(
                self.pool,
                tier,
                block_bytes=2**18,
                chunk_tokens=16,
                costs=lambda: COSTS,
                pacing=CopyPacing(lambda: False),
                to_copy=self.retention.to_copy if tier is self.tier else lambda: None,
            )
            for tier in self.tiers
        ]
        self.reloads = Reloads(engine=self.engine, tiers=SlowerTiers(self.tiers), tasks=self.tasks, costs=lambda: COSTS)
        self.regions = WorkerRegions(self.pool, self.tier.slots)
        self.num_returning, self.num_returned = 0, 0
        self.preempted_kv = PreemptedKv(
            pool=self.pool,
            tier=self.tier,
            copy_out=self.copies_out[0],
            reloads=self.reloads,
            tasks=self.tasks,
            costs=lambda: COSTS,
            chunk_tokens=16,
            returned=self.returned,
        )

    def open_disk(self, file: MemoryFile) -> DiskTier:
        """Open what the last incarnation has left. Damaged slots are not found by it, or are found out."""
        staging = np.zeros((6, HASH_BYTES), dtype=np.uint8)
        return DiskTier(
            worker=builders.worker_ref("w", epoch=self.epoch),
            store=BlockFile(file, self.shape, 5, staging),
            block_bytes=HASH_BYTES,
            num_rows=len(staging),
            copies=HostCopies(self.device, staging),
            copy_runner=self.runner,
            disk_runner=RandomDisk(self.runner),
        )

    def chain(self) -> list[bytes]:
        """Return the hashes of one of four prompts, which share prefixes."""
        prompt, length = self.rng.randint(0, 3), self.rng.randint(1, 6)
        return [bytes([1 if i < prompt else prompt + 2, i]) * (HASH_BYTES // 2) for i in range(length)]

    # -- the engine ------------------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Run a prompt: use what is cached, compute the rest, and keep the sequence for a while."""
        hashes = self.chain()
        prefix = self.pool.lookup_prefix(hashes)
        self.pool.ref(prefix.block_ids)
        entries = entries_from(prefix.first_blocks, len(hashes))[len(prefix.block_ids) :]
        new = self.pool.allocate(len(entries), entries)
        if new is None:
            self.pool.unref(prefix.block_ids)
            return
        self.pool.count_use(prefix.block_ids)
        found = hashes_of_entries(hashes, entries, self.windows.num_tables)
        for block_id, entry, block_hash in zip(new, entries, found, strict=True):
            self.device[block_id] = np.frombuffer(block_hash, dtype=np.uint8)
            self.pool.set_hash(block_id, hashes[entry // self.windows.num_tables])
            self.withdrawn.discard(block_hash)
        self.pool.announce(hashes, 0, len(hashes), is_end=True)
        hints = SessionHints(
            tenant=self.rng.choice(["t", "u"]),
            session=self.rng.choice(["", "a", "b"]),
            retain_s=self.rng.choice([None, None, 0.0, 2.0, 60.0]),
            next_in_s=self.rng.choice([None, 5.0]),
        )
        self.sequences.append((prefix.block_ids + new, self.retention.owners.arrived(hints, hashes[0])))

    def finish(self) -> None:
        if self.sequences:
            blocks, request = self.sequences.pop(self.rng.randrange(len(self.sequences)))
            self.pool.unref(blocks, request.owner)
            self.retention.owners.ended(request)

    def wait(self) -> None:
        self.now_s += self.rng.choice([0.1, 1.0, 30.0])

    def doubt(self) -> None:
        """Withdraw the blocks of a sequence, and make their content wrong, as a numerical error does."""
        if not self.sequences:
            return
        blocks, _ = self.rng.choice(self.sequences)
        own = [b for b in blocks if self.pool.num_refs(b) == 1]
        hashes = {self.pool.hash_of(b) for b in own} - {NO_HASH}
        self.pool.unpublish(own)
        self.withdrawn |= {each for each in hashes if self.pool.find(each) is None}
        for b in blocks:
            if self.pool.hash_of(b) == NO_HASH:
                self.device[b] = 254

    # -- the tier --------------------------------------------------------------------------------------------------

    def export(self) -> None:
        number = self.rng.randrange(len(self.tiers))
        work = self.store(self.copies_out[number], self.tiers[number])
        self.storing.append(asyncio.ensure_future(work))

    @staticmethod
    async def store(copy_out: CopyOut, tier: KvTier) -> None:
        """Copy one batch out, as `CopyOut.run` does."""
        batch = copy_out.next_batch()
        try:
            await tier.store(batch)
        finally:
            copy_out.end_batch(batch)

    def reload(self) -> None:
        if self.rng.random() < 0.5:
            self.calls.append(asyncio.ensure_future(self.reloads.reload(self.chain(), b"t" * 16, self.owner())))
        else:
            self.reloads.start(self.chain(), b"t" * 16, self.owner())

    def owner(self) -> ContentOwner | None:
        """Return the owner of a request that runs, if there is one."""
        return self.rng.choice(self.sequences)[1].owner if self.sequences else None

    def returned(self, _: int) -> None:
        self.num_returned += 1

    def preempt(self) -> None:
        """Demote the blocks of a prompt that are idle, as of a sequence that was preempted."""
        preempted = PreemptedSequence(seq_id=0, hashes=tuple(self.chain()))
        self.preempted_kv.deliver(EngineOutcome(preemptions=(preempted,)))

    def come_back(self) -> None:
        self.num_returning += 1
        returning = ReturningSequence(key=0, hashes=tuple(self.chain()), tenant_root=b"t" * 16, owner=self.owner())
        self.preempted_kv.deliver(EngineOutcome(returns=(returning,)))

    def spoil(self) -> None:
        """Find that content of the tier is wrong, and withdraw it."""
        slot = self.rng.randrange(self.tier.slots.num_slots)
        if (block_hash := self.tier.slots.hash_of(slot)) != NO_HASH:
            self.host[slot] = 253
            self.tier.discard(block_hash)

    def damage(self) -> None:
        """Flip a bit of a payload on the disk."""
        if self.file is not None:
            slot = self.rng.randrange(self.shape.num_slots)
            self.file.content[self.shape.payload_offset(slot) + self.rng.randrange(HASH_BYTES)] ^= 1

    def erase(self) -> None:
        """Erase all content, whose tenant is not known here."""
        if self.rng.random() < 0.2:
            self.pool.forget_tenant(b"t" * 16)
            self.calls += [asyncio.ensure_future(tier.erase_tenant(b"t" * 16)) for tier in self.tiers]

    def cancel(self) -> None:
        running = [task for task in (*self.storing, *self.calls, *self.warm_starts) if not task.done()]
        if running:
            self.rng.choice(running).cancel()

    def step(self) -> None:
        if self.runner.waiting:
            self.runner.waiting.pop(self.rng.randrange(len(self.runner.waiting))).set()

    # -- peers -----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        hashes = self.chain()
        ids = self.regions.lookup(hashes)
        if not ids:
            return
        self.regions.pin(ids)
        device, host, begin = self.device, self.host, self.pool.num_blocks
        tables = (self.device_table, self.host_table)
        self.reads.append(
            Read(
                regions=self.regions,
                memory={b: device[b] if b < begin else host[b - begin] for b in ids},
                entry=lambda b: tables[0].entry(b) if b < begin else tables[1].entry(b - begin),
                announced=[
                    AnnouncedBlock(index=i, block_id=b, generation=self.regions.generation(b), block_hash=hashes[i])
                    for i, b in enumerate(ids)
                ],
            )
        )

    def read(self) -> None:
        """Let a peer read its next block, or, after the last, validate what it has read."""
        if not self.reads:
            return
        read = self.rng.choice(self.reads)
        if len(read.seen) < len(read.announced):
            read.seen.append(bytes(read.memory[read.announced[len(read.seen)].block_id]))
            return
        self.reads.remove(read)
        for block, content in zip(read.announced, read.seen, strict=True):
            if mismatch((block,), (read.entry(block.block_id),), self.epoch) is None:
                assert content == block.block_hash
        self.end_lease(read)

    def lapse(self) -> None:
        """End the lease of a peer that goes on reading."""
        if self.reads:
            self.end_lease(self.rng.choice(self.reads))

    @staticmethod
    def end_lease(read: Read) -> None:
        if read.is_leased:
            read.is_leased = False
            read.regions.unpin([block.block_id for block in read.announced])

    async def crash(self) -> None:
        """Kill the process: everything in it is gone. Reads of peers go on, and find another epoch.

        Of the writes under way, some bytes reach the disk. What the dead process does after that has no
        effect.
        """
        if self.file is not None:
            self.file.num_bytes_left = self.rng.randint(0, MAX_BYTES_AT_DEATH)
        await self.settle()
        if self.file is not None:
            self.file = MemoryFile(self.file.content)
        for read in self.reads:
            read.seen += [bytes(HASH_BYTES)] * (len(read.announced) - len(read.seen))
        self.sequences.clear()
        self.withdrawn.clear()
        self.start()
        await self.measure()

    async def measure(self) -> None:
        for tier in self.tiers:
            measuring = asyncio.ensure_future(tier.measure(self.pool.num_blocks))
            while not measuring.done():
                self.step()
                await asyncio.sleep(0)
        if self.disk is not None:
            warm_start = WarmStart(engine=self.engine, disk=self.disk, reloads=self.reloads, costs=lambda: COSTS)
            self.warm_starts.append(asyncio.ensure_future(warm_start.run()))

    # -- checks ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self.errors
        self.pool.check()
        for tier in self.tiers:
            tier.slots.check()
            self.check_announced(tier)
        for block_hash in self.withdrawn:
            assert self.pool.find(block_hash) is None, "withdrawn content is on the device again"
            assert not any(tier.holds(block_hash) for tier in self.tiers), "withdrawn content is in a tier"
        for b in range(self.pool.num_blocks):
            if (block_hash := self.pool.hash_of(b)) != NO_HASH:
                assert bytes(self.device[b]) == block_hash == self.device_table.block_hash(b)
        for s in range(self.tier.slots.num_slots):
            if (block_hash := self.tier.slots.hash_of(s)) != NO_HASH:
                assert bytes(self.host[s]) == block_hash == self.host_table.block_hash(s)
        for blocks, _ in self.sequences:
            assert all(self.pool.num_refs(b) for b in blocks)
        for order in (self.retention.device, self.retention.host):
            assert order is not None
            assert max(order.num_of_tenant("t"), order.num_of_tenant("u")) <= self.budget
        if self.policy == "value":
            self.check_copies()

    def check_announced(self, tier: KvTier) -> None:
        """What the device has announced is announced in each tier that has it, and events say so."""
        held = set(tier.announced_hashes())
        assert all(block_hash in held for block_hash in self.pool.announced_hashes() if tier.holds(block_hash))
        for kind, block_hash in tier.take_events():
            assert ((tier, block_hash) in self.announced) is (kind is KvEventKind.EVICTED)
            self.announced ^= {(tier, block_hash)}
        assert {each for of_tier, each in self.announced if of_tier is tier} == held

    def check_copies(self) -> None:
        """The orders know which content both tiers have, unless it is in use or being copied."""
        pool, slots = self.pool, self.tier.slots
        on_device = {b: pool.hash_of(b) for b in self.retention.device.ids() if b not in pool._copies.copying}
        for block_id, group in self.retention.device._inner._group_of.items():
            if block_id in on_device:
                assert group.has_copy is self.tier.holds(on_device[block_id])
        for slot, group in self.retention.host._inner._group_of.items():
            block_id = pool.find(slots.hash_of(slot))
            if block_id is None or not pool.num_refs(block_id):
                assert group.has_copy is (block_id is not None) or block_id in self.pinned_by_peers()

    def pinned_by_peers(self) -> set[int]:
        return {block.block_id for read in self.reads if read.is_leased for block in read.announced}

    async def settle(self) -> None:
        """Let every copy and reload end."""
        tasks = [*self.storing, *self.calls, *self.warm_starts]
        while any(not task.done() for task in tasks) or len(self.tasks) or self.runner.waiting:
            self.step()
            await asyncio.sleep(0)
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception) and not isinstance(ended, DeviceFailed):
                raise ended
        for each in (self.storing, self.calls, self.warm_starts):
            each.clear()

    async def run(self, num_actions: int) -> None:
        actions = [
            self.compute,
            self.compute,
            self.finish,
            self.finish,
            self.finish,
            self.doubt,
            self.export,
            self.export,
        ]
        actions += [self.reload, self.reload, self.cancel, self.follow, self.read, self.read, self.read]
        actions += [self.step] * 6 + [
            self.lapse,
            self.spoil,
            self.preempt,
            self.come_back,
            self.damage,
            self.erase,
            self.wait,
        ]
        await self.measure()
        for _ in range(num_actions):
            if self.rng.random() < 0.003:
                await self.crash()
            self.rng.choice(actions)()
            for _ in range(self.rng.randint(0, 3)):
                await asyncio.sleep(0)
            self.check()
        while self.sequences:
            self.finish()
        while self.reads:
            self.read()
        await self.settle()
        self.check()
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total == self.pool.num_allocatable
        assert not any(tier.counts().busy for tier in self.tiers)
        assert self.num_returned == self.num_returning


@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "host and disk"])
@pytest.mark.parametrize("windows", [(0,), (0, 6)], ids=["one table", "a table with a window"])
@pytest.mark.parametrize("seed", range(sized(10, 200)))
@pytest.mark.parametrize("policy", ["value", "lru"])
def test_a_block_found_by_hash_has_its_content(
    seed: int, windows: tuple[int, ...], policy: str, has_disk: bool
) -> None:
    asyncio.run(World(seed, windows, policy, has_disk=has_disk).run(600))
