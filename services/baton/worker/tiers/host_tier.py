"""`HostTier`: the KV blocks that a worker keeps in host memory, which its peers may read, too."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from baton.core.cluster.worker_report import TierReport
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import KvEventKind, Tier
from baton.engine.tiers.copy_policy import COPY_BYTES, DISPLACED_S
from baton.engine.tiers.kv_tier import BlockToStore, TierCounts
from baton.engine.tiers.slots import TierSlots
from baton.engine.tiers.tier_speed import TierSpeed
from baton.runtime.failpoints import hit
from baton.runtime.logging import get_logger
from baton.transfer.integrity.generation_table import MemoryGenerationTable
from baton.transfer.integrity.validate_read import AnnouncedBlock, mismatch
from baton.worker.tiers.running_calls import MAX_STOP_S, RunningCalls
from baton.worker.tiers.tier_copies import CopyRunner, TierCopies

log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class TierTotals:
    """Counters since the start, for metrics.

    invalid_blocks: loaded blocks whose generation or hash was not the expected one; they were not used.
    failed_copies: copies that raised an error.
    """

    stored_blocks: int = 0
    stored_bytes: int = 0
    store_s: float = 0.0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    invalid_blocks: int = 0
    failed_copies: int = 0


class HostTier:
    """Implements `KvTier` over host memory.

    slots: the slots, on which peers hold leases. A slot's number is its block id in the region that peers
        read.
    """

    tier = Tier.HOST

    def __init__(
        self,
        *,
        worker: WorkerRef,
        num_slots: int,
        block_bytes: int,
        generations: MemoryGenerationTable,
        copies: TierCopies,
        runner: CopyRunner,
        shares_cores: bool = True,
    ) -> None:
        """Take ownership of `copies` and `runner`.

        generations: of the slots, in memory that peers read
        shares_cores: copies run on the cores on which steps compute
        """
        self.slots = TierSlots(num_slots, generations)
        self.totals = TierTotals()
        self.block_bytes = block_bytes
        self._worker = worker
        self._generations = generations
        self._copies = copies
        self._runner = runner
        self._displaced_s = DISPLACED_S if shares_cores else 0.0
        self._num_stores = 0
        self._speed = TierSpeed(block_bytes)
        self._calls = RunningCalls()

    @property
    def stores_busy_s(self) -> float:
        return self.totals.store_s + self._num_stores * self._displaced_s

    @property
    def answers(self) -> bool:
        """True: memory answers."""
        return True

    @property
    def store_pause_s(self) -> float:
        """0: a copy that failed is tried with the next blocks."""
        return 0.0

    def counts(self) -> TierCounts:
        return self.slots.counts()

    def holds(self, block_hash: BlockHash) -> bool:
        return self.slots.slot_of(block_hash) is not None

    def load_s(self, num_blocks: int) -> float | None:
        return self._speed.load_s(num_blocks, asyncio.get_running_loop().time())

    @property
    def load_block_s(self) -> float | None:
        return self._speed.load_block_s(asyncio.get_running_loop().time())

    def store_s(self, num_blocks: int) -> float | None:
        return self._speed.store_s(num_blocks)

    def report(self, num_loading_blocks: int) -> TierReport:
        """Return the state of the tier for schedulers. `num_loading_blocks`: of the reloads under way."""
        counts, block_s = self.counts(), self.load_block_s
        return TierReport(
            tier=self.tier.value,
            total=counts.total,
            held=counts.held,
            load_bytes_per_s=self.block_bytes / block_s if block_s else 0.0,
            load_overhead_s=self._speed.load_fixed_s(asyncio.get_running_loop().time()),
            loading_bytes=num_loading_blocks * self.block_bytes,
        )

    async def measure(self, num_device_blocks: int) -> None:
        """Measure the speed of copies out, before the first store. The slots that it writes are free.

        The first of two copies allocates memory, so it does not count.
        """
        count = min(num_device_blocks, self.slots.num_slots, max(1, COPY_BYTES // self.block_bytes))
        took_s = None
        for _ in range(2):
            took_s = await self._calls.to_its_end(self._copy(self._copies.to_host, range(count), range(count)))
        if took_s is not None:
            self._speed.stored(count, took_s)

    async def store(self, blocks: Sequence[BlockToStore]) -> int:
        filling = self.slots.begin_fill(blocks)  # now, so that content that is discarded from now on is dropped
        return await self._calls.to_its_end(self._store(filling)) if filling else 0

    async def load(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[int], *, within_s: float | None = None
    ) -> int:
        """Otherwise as in `KvTier`, but without a limit: memory answers."""
        return await self._calls.measured_load(
            self._load(hashes, block_ids),
            self._speed,
            num_blocks=min(len(hashes), len(block_ids)),
        )

    def count_use(self, block_hash: BlockHash) -> None:
        if (slot := self.slots.slot_of(block_hash)) is not None:
            self.slots.count_use((slot,))

    def announce(self, block_hash: BlockHash) -> None:
        self.slots.announce(block_hash)

    def discard(self, block_hash: BlockHash) -> None:
        self.slots.discard(block_hash)

    async def erase_tenant(self, tenant_root: BlockHash) -> int:
        hashes = self.slots.hashes_of_tenant(tenant_root)
        for block_hash in hashes:
            self.slots.discard(block_hash)
        return len(hashes)

    def announced_hashes(self) -> list[BlockHash]:
        return self.slots.announced_hashes()

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        return self.slots.take_events()

    async def aclose(self) -> None:
        if await self._calls.ended(MAX_STOP_S):
            self._runner.close()
            self._copies.close()
        else:
            log.warning("host_kv_not_closed", problem="the device does not end its copies")

    # -- internal ----------------------------------------------------------------------------------

    async def _store(self, filling: Mapping[int, BlockToStore]) -> int:
        self._num_stores += 1
        block_ids = [block.block_id for block in filling.values()]
        took_s = await self._copy(self._copies.to_host, block_ids, list(filling))
        num_stored = self.slots.end_fill(filling, is_complete=took_s is not None)
        if took_s is not None:
            self._speed.stored(len(filling), took_s)
            self.totals.stored_blocks += num_stored
            self.totals.stored_bytes += len(filling) * self.block_bytes
            self.totals.store_s += took_s
        return num_stored

    async def _load(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> int:
        slots = self.slots.lookup(hashes[: len(block_ids)])
        if not slots:
            return 0
        self.slots.pin(slots)
        expected = [
            AnnouncedBlock(index=index, block_id=slot, generation=self.slots.generation(slot), block_hash=hashes[index])
            for index, slot in enumerate(slots)
        ]
        took_s = await self._copy(self._copies.to_device, slots, block_ids[: len(slots)])
        num_loaded = 0 if took_s is None else self._num_valid(expected)
        self.slots.count_use(slots[:num_loaded])
        self.slots.unpin(slots)  # afterwards, so that the end of a chain is evicted first
        if took_s is not None:
            self.totals.loaded_blocks += num_loaded
            self.totals.loaded_bytes += len(slots) * self.block_bytes
            self.totals.load_s += took_s
        return num_loaded

    def _num_valid(self, expected: Sequence[AnnouncedBlock]) -> int:
        """Return how many leading slots still have the content that they had before the copy."""
        for count, block in enumerate(expected):
            entry = self._generations.entry(block.block_id)
            what = mismatch((block,), (entry,), self._worker.worker_epoch)
            if what is not None:
                self.totals.invalid_blocks += len(expected) - count
                log.warning("kv_reload_invalid", what=what, num_blocks=len(expected) - count)
                return count
        return len(expected)

    async def _copy(
        self,
        copy: Callable[[Sequence[int], Sequence[int]], None],
        source: Sequence[int],
        destination: Sequence[int],
    ) -> float | None:
        """Return how long the copy took; None if it failed."""
        try:
            hit("tier.before_copy", num_blocks=len(source))
            return await self._runner.run(partial(copy, source, destination), len(source) * self.block_bytes)
        except Exception:  # errors of the device library
            log.exception("kv_tier_copy_failed", num_blocks=len(source))
            self.totals.failed_copies += 1
            return None
