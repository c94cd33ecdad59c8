"""`DiskTier`: the KV blocks that a worker keeps in a file, where the next process finds them."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Protocol

from baton.core.cluster.worker_report import TierReport
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import KvEventKind, Tier
from baton.engine.retention.content_owner import NO_USE
from baton.engine.retention.eviction_order import ReuseLruOrder
from baton.engine.tiers.copy_policy import COPY_BYTES, DISPLACED_S
from baton.engine.tiers.kv_tier import BlockToStore, TierCounts
from baton.engine.tiers.slots import FIRST_USE_SHARE, TierSlots
from baton.engine.tiers.tier_speed import TierSpeed
from baton.runtime.failpoints import hit
from baton.runtime.logging import get_logger
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.transfer.integrity.validate_read import AnnouncedBlock, mismatch
from baton.worker.disk.disk_format import DiskDefect, SlotHeader
from baton.worker.disk.disk_runner import NUM_READERS, DiskRunner
from baton.worker.disk.header_marks import HeaderMarks, HeaderStore
from baton.worker.disk.os_file import NoAnswer
from baton.worker.tiers.host_tier import TierTotals
from baton.worker.tiers.running_calls import MAX_STOP_S, RunningCalls
from baton.worker.tiers.staging_rows import StagingRows
from baton.worker.tiers.tier_copies import CopyRunner, TierCopies

log = get_logger(__name__)

STORE_PAUSE_S = 10.0
"""Time without stores after one that failed: a disk that is full or failing is not better a moment later."""
SILENT_S = 1.0
"""A disk does not answer if a read takes longer than this and than its limit."""
SILENT_S_PER_BYTE = 1.0
"""Reported speed of a disk that does not answer. Schedulers expect no reload from it."""
MEASURED_BLOCKS = 8
"""Most blocks that are read or written at start to measure the speed."""


class BlockStore(HeaderStore, Protocol):
    """Blocks in the slots of a file, see `worker.disk.block_file.BlockFile`. Methods block, except
    `sequence`."""

    num_slots: int
    held: list[SlotHeader]
    defects: "Counter[DiskDefect]"

    def probe(self, slots: Sequence[int], rows: Sequence[int]) -> None: ...

    def write(self, blocks: Mapping[int, BlockToStore], rows: Sequence[int]) -> None: ...

    def read(self, hashes: Mapping[int, BlockHash], rows: Sequence[int]) -> list[DiskDefect | None]: ...

    def erase(self, tenant_root: BlockHash) -> int: ...

    def close(self) -> None: ...


class DiskTier:
    """Implements `KvTier` over a file. Peers do not read it.

    Blocks pass through rows of a staging buffer: some are for stores, the others for loads. A load that finds
    a defect drops the content, counts it, and ends there. Owners of content do not matter for its eviction,
    and are not kept: a disk has far more slots than there are requests in memory.
    """

    tier = Tier.DISK

    def __init__(
        self,
        *,
        worker: WorkerRef,
        store: BlockStore,
        block_bytes: int,
        num_rows: int,
        copies: TierCopies,
        copy_runner: CopyRunner,
        disk_runner: DiskRunner,
        shares_cores: bool = True,
    ) -> None:
        """Take ownership of all but the worker's identity. Content that `store` holds can be loaded at once.

        copies: between the device and the rows of the staging buffer, at least 2
        shares_cores: steps run on the processor's cores, which writes need, too
        """
        self.totals = TierTotals()
        self.block_bytes = block_bytes
        self.defects = store.defects
        self._worker = worker
        self._generations = MemoryGenerationTable(bytearray(store.num_slots * ENTRY_BYTES), worker.worker_epoch)
        self.slots = TierSlots(store.num_slots, self._generations)
        self._order = ReuseLruOrder(store.num_slots, FIRST_USE_SHARE)
        self.slots.order_by(self._order)
        for header in store.held:
            self.slots.restore(header.slot, _restored(header))
        self.num_restored = len(store.held)
        store.held = []  # as large as the index of all slots
        self._store, self._copies = store, copies
        self._copy_runner, self._disk_runner = copy_runner, disk_runner
        self._shares_cores = shares_cores
        num_stored_at_once = num_rows // 2
        self._store_rows = range(num_stored_at_once)
        self._load_rows = StagingRows(range(num_stored_at_once, num_rows))
        # Small enough that all readers take part: a single one would wait for the disk at each block.
        self._part_blocks = max(1, min(self._load_rows.num_rows // NUM_READERS, COPY_BYTES // block_bytes))
        self._speed = TierSpeed(block_bytes)
        self._stage_s, self._num_stores = 0.0, 0
        self._store_turn = asyncio.Lock()
        self._store_after_s = 0.0
        self._calls = RunningCalls()
        self._num_silent_reads = 0
        self._is_stuck = False
        self._marks = HeaderMarks(store, disk_runner, self._calls.start)

    @property
    def stores_busy_s(self) -> float:
        if not self._shares_cores:
            return self._stage_s
        return self._stage_s + self._disk_runner.writes_busy_s + self._num_stores * DISPLACED_S

    def counts(self) -> TierCounts:
        return self.slots.counts()

    def holds(self, block_hash: BlockHash) -> bool:
        return self.slots.slot_of(block_hash) is not None

    def load_s(self, num_blocks: int) -> float | None:
        return self._speed.load_s(num_blocks, asyncio.get_running_loop().time())

    @property
    def load_block_s(self) -> float | None:
        return self._speed.load_block_s(asyncio.get_running_loop().time())

    @property
    def answers(self) -> bool:
        """False while a read that was late goes on for more than `SILENT_S`, and after a copy that has never
        ended."""
        return not self._num_silent_reads and not self._is_stuck

    @property
    def store_pause_s(self) -> float:
        return max(0.0, self._store_after_s - asyncio.get_running_loop().time())

    def store_s(self, num_blocks: int) -> float | None:
        return self._speed.store_s(num_blocks)

    def report(self, num_loading_blocks: int) -> TierReport:
        """Return the state of the tier for schedulers. `num_loading_blocks`: of the reloads under way."""
        counts = self.counts()
        block_s = self.load_block_s if self.answers else SILENT_S_PER_BYTE * self.block_bytes
        return TierReport(
            tier=self.tier.value,
            total=counts.total,
            held=counts.held,
            load_bytes_per_s=self.block_bytes / block_s if block_s else 0.0,
            load_overhead_s=self._speed.load_fixed_s(asyncio.get_running_loop().time()),
            loading_bytes=num_loading_blocks * self.block_bytes,
        )

    async def measure(self, num_device_blocks: int) -> None:
        """Measure the speed: of loads of what an earlier process has left, else of stores to free slots.

        A first load starts threads and allocates memory, so it does not count. The order of eviction stays.
        """
        count = min(MEASURED_BLOCKS, self._load_rows.num_rows)
        hashes = [each.block_hash for each in self.evicted_last(2 * count)]
        if not hashes:
            await self._calls.to_its_end(self._probe())
            return
        for part in (hashes[-count:], hashes[:count]):
            self._speed.loads.forget()
            await self._measured(self._load(part, None), len(part))
        self._speed.loads.forget_with_the_next()

    async def store(self, blocks: Sequence[BlockToStore]) -> int:
        if self.store_pause_s:
            return 0
        # Now, so that content that is discarded from now on is dropped, also while its copy waits for its turn.
        filling = self.slots.begin_fill([replace(block, use=NO_USE) for block in blocks])
        return await self._calls.to_its_end(self._store_all(filling)) if filling else 0

    async def load(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[int], *, within_s: float | None = None
    ) -> int:
        load = self._load(hashes, block_ids, within_s=within_s)
        return await self._measured(load, min(len(hashes), len(block_ids)), within_s)

    async def load_unused(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[int], *, within_s: float | None = None
    ) -> int:
        """Load content that no request has asked for. Otherwise as `load`; it does not count as a use."""
        load = self._load(hashes, block_ids, within_s=within_s, is_use=False)
        return await self._measured(load, min(len(hashes), len(block_ids)), within_s)

    def evicted_last(self, count: int) -> list[BlockToStore]:
        """Return the idle content that is evicted last, at most `count` blocks, the last first.

        `block_id` means nothing.
        """
        return [self.slots.content_of(slot) for slot in self._order.last(count)]

    def count_use(self, block_hash: BlockHash) -> None:
        if (slot := self.slots.slot_of(block_hash)) is not None:
            self.slots.count_use((slot,))

    def announce(self, block_hash: BlockHash) -> None:
        if (slot := self.slots.announce(block_hash)) is not None:
            self._marks.announce((slot,))

    def discard(self, block_hash: BlockHash) -> None:
        slot = self.slots.slot_of(block_hash)
        self.slots.discard(block_hash)
        if slot is not None:
            self._marks.drop((slot,))

    async def erase_tenant(self, tenant_root: BlockHash) -> int:
        return await self._calls.to_its_end(self._erase(tenant_root))

    def announced_hashes(self) -> list[BlockHash]:
        return self.slots.announced_hashes()

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        return self.slots.take_events()

    async def aclose(self) -> None:
        """Wait up to `MAX_STOP_S`. A disk that does not answer until then is not closed."""
        if await self._calls.ended(MAX_STOP_S):
            self._copy_runner.close()
            self._copies.close()
            self._calls.start(self._disk_runner.write(self._store.close, 0))
        if not await self._calls.ended(MAX_STOP_S):
            log.warning("disk_kv_not_closed", problem="the disk does not answer")
        self._disk_runner.close()

    # -- stores ----------------------------------------------------------------------------------------------------

    async def _store_all(self, filling: Mapping[int, BlockToStore]) -> int:
        num_stored, at_once, slots = 0, len(self._store_rows), list(filling)
        for first in range(0, len(slots), at_once):
            async with self._store_turn:
                num_stored += await self._store_some({slot: filling[slot] for slot in slots[first : first + at_once]})
        return num_stored

    async def _store_some(self, filling: Mapping[int, BlockToStore]) -> int:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        # What was discarded while it waited for its turn may have been erased, and must not be written after that.
        wanted = {slot: block for slot, block in filling.items() if self.slots.is_wanted(slot)}
        rows, num_bytes = self._store_rows[: len(wanted)], len(wanted) * self.block_bytes
        is_complete = False
        self._num_stores += bool(wanted)
        try:
            if wanted:
                hit("tier.before_copy", num_blocks=len(wanted))
                stage = partial(self._copies.to_host, [block.block_id for block in wanted.values()], rows)
                self._stage_s += await self._copy_runner.run(stage, num_bytes)
                await self._disk_runner.write(partial(self._store.write, wanted, rows), num_bytes)
            is_complete = True
        except Exception as error:  # of the disk, or of the device library
            log.warning("disk_kv_store_failed", num_blocks=len(wanted), problem=f"{type(error).__name__}: {error}")
            self.totals.failed_copies += 1
            if isinstance(error, OSError):
                self._store_after_s = max(self._store_after_s, loop.time() + STORE_PAUSE_S)
            self._note_stuck(error)
        num_stored = self.slots.end_fill(filling, is_complete=is_complete)
        if is_complete:
            took_s = loop.time() - began_s
            self._speed.stored(len(wanted), took_s)
            self.totals.stored_blocks += num_stored
            self.totals.stored_bytes += num_bytes
            self.totals.store_s += took_s
        # Content that was discarded meanwhile has a valid header, and so may what was in the slots before.
        self._marks.drop(slot for slot in filling if not self.slots.has_content(slot))
        self._marks.announce(
            slot
            for slot, block in filling.items()
            if self.slots.has_content(slot) and self.slots.content_of(slot).is_announced > block.is_announced
        )
        return num_stored

    async def _probe(self) -> int:
        """Write payloads without headers. Returns how many."""
        loop = asyncio.get_running_loop()
        rows = self._store_rows[: min(self.slots.num_slots, MEASURED_BLOCKS)]
        num_bytes, began_s = len(rows) * self.block_bytes, loop.time()
        try:
            async with self._store_turn:
                await self._disk_runner.write(partial(self._store.probe, rows, rows), num_bytes)
        except OSError as error:  # it has been counted
            self._note_stuck(error)
            return 0
        self._speed.stored(len(rows), loop.time() - began_s)
        return len(rows)

    async def _erase(self, tenant_root: BlockHash) -> int:
        hashes = self.slots.hashes_of_tenant(tenant_root)
        slots = [slot for each in hashes if (slot := self.slots.slot_of(each)) is not None]
        for block_hash in hashes:
            self.slots.discard(block_hash)
        try:
            async with self._store_turn:
                return await self._disk_runner.write(partial(self._store.erase, tenant_root), 0)
        except OSError as error:
            self._note_stuck(error)
            # The next process must not use it.
            self._marks.drop(slot for slot in slots if not self.slots.has_content(slot))
            raise

    # -- loads -----------------------------------------------------------------------------------------------------

    async def _measured(self, load: Coroutine[Any, Any, int], num_blocks: int, within_s: float | None = None) -> int:
        """Run a load of `num_blocks` to its end, and record its time."""
        return await self._calls.measured_load(
            load,
            self._speed,
            num_blocks=num_blocks,
            within_s=within_s,
        )

    async def _load(
        self,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[int] | None,
        *,
        within_s: float | None = None,
        is_use: bool = True,
    ) -> int:
        """Load the leading blocks that are known. block_ids: None loads into the staging buffer only."""
        slots = self.slots.lookup(hashes if block_ids is None else hashes[: len(block_ids)])
        if not slots or not self.answers:
            return 0
        loop = asyncio.get_running_loop()
        self.slots.pin(slots)
        expected = [
            AnnouncedBlock(index=index, block_id=slot, generation=self.slots.generation(slot), block_hash=hashes[index])
            for index, slot in enumerate(slots)
        ]
        began_s = loop.time()
        parts = [expected[first : first + self._part_blocks] for first in range(0, len(slots), self._part_blocks)]
        until_s = None if within_s is None else began_s + within_s
        loaded = await asyncio.gather(*(self._load_part(part, block_ids, until_s) for part in parts))
        num_loaded = self._num_valid(expected, [is_loaded for part in loaded for is_loaded in part])
        num_bytes = sum(map(sum, loaded)) * self.block_bytes
        if block_ids is not None:
            if is_use:
                self.slots.count_use(slots[:num_loaded])
            self.totals.loaded_blocks += num_loaded
            self.totals.loaded_bytes += num_bytes
            self.totals.load_s += loop.time() - began_s
        self.slots.unpin(slots)
        return num_loaded

    async def _load_part(
        self, part: Sequence[AnnouncedBlock], block_ids: Sequence[int] | None, until_s: float | None
    ) -> list[bool]:
        """Read blocks, verify them and copy the good ones to the device. Returns for each whether it was.

        What is not read by `until_s` is not copied. A read cannot be stopped; it keeps its rows.
        """
        loop, loaded = asyncio.get_running_loop(), [False] * len(part)
        rows = await self._load_rows.take(len(part), until_s)
        if rows is None:
            return loaded
        began_s = loop.time()
        reading = self._calls.start(self._read_part(part, rows))
        await asyncio.wait((reading,), timeout=None if until_s is None else max(0.0, until_s - began_s))
        if not reading.done():
            self._read_is_late(reading, rows, began_s)
            return loaded
        try:
            good = reading.result()
            if block_ids is not None and good:
                into = [block_ids[part[index].index] for index in good]
                copy = partial(self._copies.to_device, [rows[index] for index in good], into)
                await self._copy_runner.run(copy, len(good) * self.block_bytes)
        except Exception as error:  # errors of the device library
            log.warning("disk_kv_load_failed", num_blocks=len(part), problem=f"{type(error).__name__}: {error}")
            self.totals.failed_copies += 1
            return loaded
        finally:
            self._load_rows.give_back(rows)
        for index in good:
            loaded[index] = True
        return loaded

    async def _read_part(self, part: Sequence[AnnouncedBlock], rows: Sequence[int]) -> list[int]:
        """Read blocks into rows and verify them. Returns the positions of the good ones."""
        hit("tier.before_copy", num_blocks=len(part))
        hashes = {block.block_id: block.block_hash for block in part}
        try:
            read = partial(self._store.read, hashes, rows)
            defects = await self._disk_runner.read(read, len(part) * self.block_bytes)
        except NoAnswer as error:
            self._note_stuck(error)
            raise
        for block, defect in zip(part, defects, strict=True):
            if defect is not None:
                self._found(block, defect)
        return [index for index, defect in enumerate(defects) if defect is None]

    def _read_is_late(self, reading: "asyncio.Task[list[int]]", rows: Sequence[int], began_s: float) -> None:
        """Follow a read that goes on after its limit, until it ends."""
        loop = asyncio.get_running_loop()
        is_silent = False

        def silent() -> None:
            nonlocal is_silent
            if self.answers:
                log.warning("disk_kv_does_not_answer", hint="nothing is reloaded from it; prompts are computed")
            is_silent = True
            self._num_silent_reads += 1

        def ended(task: "asyncio.Task[list[int]]") -> None:
            timer.cancel()
            self._load_rows.give_back(rows)
            if not task.cancelled():
                task.exception()  # a failed read is only late
            if not is_silent:
                self._speed.loads.read_was_late(len(rows), loop.time() - began_s, loop.time())
                return
            self._num_silent_reads -= 1
            if self.answers:
                log.info("disk_kv_answers_again")

        timer = loop.call_at(max(loop.time(), began_s + SILENT_S), silent)
        reading.add_done_callback(ended)

    def _note_stuck(self, error: Exception) -> None:
        """Use the disk no more if `error` says that a copy may never end: all later ones fail, too."""
        if isinstance(error, NoAnswer) and not self._is_stuck:
            self._is_stuck, self._store_after_s = True, inf
            hint = "restart the worker; until then nothing is reloaded from the disk or stored there"
            log.error("disk_kv_stuck", problem=str(error), hint=hint)

    def _found(self, block: AnnouncedBlock, defect: DiskDefect) -> None:
        """Drop content whose payload is not as its header says, unless it was dropped while it was read."""
        if not self._is_valid(block):
            return
        log.warning("disk_kv_defect_found", defect=defect.value, slot=block.block_id)
        self.defects[defect] += 1
        self.totals.invalid_blocks += 1
        self.discard(block.block_hash)

    def _num_valid(self, expected: Sequence[AnnouncedBlock], loaded: Sequence[bool]) -> int:
        """Return how many leading blocks were loaded and are still what they were before."""
        for count, (block, is_loaded) in enumerate(zip(expected, loaded, strict=True)):
            if not is_loaded or not self._is_valid(block):
                return count
        return len(expected)

    def _is_valid(self, block: AnnouncedBlock) -> bool:
        entry = self._generations.entry(block.block_id)
        return mismatch((block,), (entry,), self._worker.worker_epoch) is None


def _restored(header: SlotHeader) -> BlockToStore:
    """Return the content of a slot. Its device block is not known."""
    return BlockToStore(
        block_id=0,
        block_hash=header.block_hash,
        is_announced=header.is_announced,
        is_reused=header.is_reused,
        tenant_root=header.tenant_root,
    )
