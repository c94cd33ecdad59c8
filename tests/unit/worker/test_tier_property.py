"""Pool, host tier, copies out, reloads and readers together, under random interleavings.

The content of a block is the hash of its tokens, so content under a wrong hash shows at once. The naive
model is the
rule itself: whoever finds a block by hash, on the device, in the tier or as a peer, must see that content.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from baton.core.kv.block_hash import NO_HASH
from baton.core.kv.kv_tables import TableWindows, entries_from, hashes_of_entries
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.outcome import EngineOutcome, PreemptedSequence, ReturningSequence
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.transfer.integrity.validate_read import AnnouncedBlock, mismatch
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.tiers.copy_out import CopyOut
from baton.worker.tiers.host_tier import HostTier
from baton.worker.tiers.preempted_kv import PreemptedKv
from baton.worker.tiers.reloads import Reloads
from baton.worker.tiers.slower_tiers import SlowerTiers
from baton.worker.tiers.tier_copies import HostCopies
from baton.worker.tiers.worker_regions import WorkerRegions
from tests import builders
from tests.scale import sized

SIZE = 4
COSTS = StepCostModel.of((0.01, 0.001, 0.0, 0.0, 0.0, 0.0))
"""Computing a block takes far longer than a copy, so that every block is worth one."""
HASH_BYTES = len(NO_HASH)


class RandomRunner:
    """A `CopyRunner` that copies some time after the call, returns some time after that, and sometimes
    fails."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.waiting: list[asyncio.Event] = []

    async def run(self, copy: Callable[[], None], num_bytes: int) -> float:
        await self._step()
        if self._rng.random() < 0.1:
            raise RuntimeError("the device failed")
        copy()
        await self._step()
        return 1e-6

    def close(self) -> None:
        pass

    async def _step(self) -> None:
        event = asyncio.Event()
        self.waiting.append(event)
        await event.wait()


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

    def __init__(self, seed: int, windows: tuple[int, ...]) -> None:
        self.rng = random.Random(seed)
        self.windows = TableWindows(windows, SIZE)
        self.tasks = BackgroundTasks(self.failed)
        self.errors: list[BaseException] = []
        self.epoch = 0
        self.bad: set[bytes] = set()
        self.storing: list[asyncio.Task[None]] = []
        self.calls: list[asyncio.Task[int]] = []
        self.reads: list[Read] = []
        self.sequences: list[list[int]] = []
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
        self.pool = BlockPool(num_blocks, SIZE, self.device_table, self.windows)
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
        engine = Engine(config, self.pool, clock=lambda: 0.0)
        self.copy_out = CopyOut(
            self.pool, self.tier, block_bytes=2**18, chunk_tokens=16, costs=lambda: COSTS, is_busy=lambda: False
        )
        self.reloads = Reloads(engine=engine, tiers=SlowerTiers([self.tier]), tasks=self.tasks, costs=lambda: COSTS)
        self.regions = WorkerRegions(self.pool, self.tier.slots)
        self.num_returning, self.num_returned = 0, 0
        self.preempted_kv = PreemptedKv(
            pool=self.pool,
            tier=self.tier,
            copy_out=self.copy_out,
            reloads=self.reloads,
            tasks=self.tasks,
            costs=lambda: COSTS,
            chunk_tokens=16,
            returned=self.returned,
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
        self.sequences.append(prefix.block_ids + new)

    def finish(self) -> None:
        if self.sequences:
            self.pool.unref(self.sequences.pop(self.rng.randrange(len(self.sequences))))

    def doubt(self) -> None:
        """Withdraw the blocks of a sequence, and make their content wrong, as a numerical error does."""
        if not self.sequences:
            return
        blocks = self.rng.choice(self.sequences)
        self.pool.unpublish([b for b in blocks if self.pool.num_refs(b) == 1])
        for b in blocks:
            if self.pool.hash_of(b) == NO_HASH:
                self.device[b] = 254

    # -- the tier --------------------------------------------------------------------------------------------------

    def export(self) -> None:
        self.storing.append(asyncio.ensure_future(self.store(self.copy_out, self.pool, self.tier)))

    @staticmethod
    async def store(copy_out: CopyOut, pool: BlockPool, tier: HostTier) -> None:
        """Copy one batch out, as `CopyOut.run` does."""
        batch = copy_out.next_batch()
        try:
            await tier.store(batch)
        finally:
            pool.end_copy([block.block_id for block in batch])

    def reload(self) -> None:
        if self.rng.random() < 0.5:
            self.calls.append(asyncio.ensure_future(self.reloads.reload(self.chain())))
        else:
            self.reloads.start(self.chain())

    def returned(self, _: int) -> None:
        self.num_returned += 1

    def preempt(self) -> None:
        """Demote the blocks of a prompt that are idle, as of a sequence that was preempted."""
        preempted = PreemptedSequence(seq_id=0, hashes=tuple(self.chain()))
        self.preempted_kv.deliver(EngineOutcome(preemptions=(preempted,)))

    def come_back(self) -> None:
        self.num_returning += 1
        self.preempted_kv.deliver(EngineOutcome(returns=(ReturningSequence(key=0, hashes=tuple(self.chain())),)))

    def spoil(self) -> None:
        """Find that content of the tier is wrong, and withdraw it."""
        slot = self.rng.randrange(self.tier.slots.num_slots)
        if (block_hash := self.tier.slots.hash_of(slot)) != NO_HASH:
            self.host[slot] = 253
            self.tier.discard(block_hash)

    def cancel(self) -> None:
        running = [task for task in (*self.storing, *self.calls) if not task.done()]
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
        """End the process: everything in it is gone. Reads of peers go on, and find another epoch."""
        await self.settle()
        for read in self.reads:
            read.seen += [bytes(HASH_BYTES)] * (len(read.announced) - len(read.seen))
        self.sequences.clear()
        self.start()
        await self.measure()

    async def measure(self) -> None:
        measuring = asyncio.ensure_future(self.tier.measure(self.pool.num_blocks))
        while not measuring.done():
            self.step()
            await asyncio.sleep(0)

    # -- checks ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self.errors
        self.pool.check()
        self.tier.slots.check()
        for b in range(self.pool.num_blocks):
            if (block_hash := self.pool.hash_of(b)) != NO_HASH:
                assert bytes(self.device[b]) == block_hash == self.device_table.block_hash(b)
        for s in range(self.tier.slots.num_slots):
            if (block_hash := self.tier.slots.hash_of(s)) != NO_HASH:
                assert bytes(self.host[s]) == block_hash == self.host_table.block_hash(s)
        for blocks in self.sequences:
            assert all(self.pool.num_refs(b) for b in blocks)

    async def settle(self) -> None:
        """Let every copy and reload end."""
        while any(not task.done() for task in (*self.storing, *self.calls)) or len(self.tasks):
            self.step()
            await asyncio.sleep(0)
        await asyncio.gather(*self.storing, *self.calls, return_exceptions=True)
        self.storing.clear()
        self.calls.clear()

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
        actions += [self.step] * 6 + [self.lapse, self.spoil, self.preempt, self.come_back]
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
        assert self.tier.counts().busy == 0
        assert self.num_returned == self.num_returning


@pytest.mark.parametrize("windows", [(0,), (0, 6)], ids=["one table", "a table with a window"])
@pytest.mark.parametrize("seed", range(sized(15, 500)))
def test_a_block_found_by_hash_has_its_content(seed: int, windows: tuple[int, ...]) -> None:
    asyncio.run(World(seed, windows).run(600))
