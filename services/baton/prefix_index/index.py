"""The prefix index: which worker holds, or will soon hold, which leading blocks of a prompt."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import Tier
from baton.prefix_index.block_claims import Claims
from baton.prefix_index.eviction_record import EvictionRecord
from baton.prefix_index.expected_blocks import MAX_EXPECTED_BLOCKS, ExpectedBlocks

MAX_BLOCKS_PER_WORKER = 16_777_216
SWEPT_CLAIMS_PER_CHANGE = 2
"""Claims of ended incarnations that are removed per changed block. They are gone long before new claims fill
the memory."""

_ABSENT = object()
_IN_MEMORY = (Tier.DEVICE, Tier.HOST)
"""Tiers that other workers can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOverlap:
    """Number of leading blocks of a prompt that a worker has.

    num_blocks: blocks that it holds or is expected to hold soon.
    num_held_blocks: blocks that it holds now, in any tier. It may hold a few more, up to the next one that it
        would announce.
    num_device_blocks: leading blocks that are in device memory.
    num_disk_blocks: blocks that it holds, from the first that is on its disk only. Others can pull them after
        a reload.
    """

    num_blocks: int
    num_held_blocks: int
    num_device_blocks: int
    num_disk_blocks: int = 0

    @property
    def num_reloaded_blocks(self) -> int:
        """Blocks that it holds, but must reload from a slower tier: those after the first that is not in
        device memory."""
        return self.num_held_blocks - self.num_device_blocks


_NOTHING = PrefixOverlap(num_blocks=0, num_held_blocks=0, num_device_blocks=0)


class _Holder:
    """One incarnation of a worker.

    bit: its bit in masks.
    announce_every: of how many successive blocks of a chain it claims one, and the last one.
    held: blocks that it claims, by tier. A dict, because it takes less memory than a set.
    """

    __slots__ = ("announce_every", "bit", "held", "max_blocks", "worker")

    def __init__(self, worker: WorkerRef, bit: int, max_blocks: int, announce_every: int) -> None:
        self.worker = worker
        self.bit = bit
        self.max_blocks = max_blocks
        self.announce_every = announce_every
        self.held: dict[Tier, dict[BlockHash, None]] = {}


class PrefixIndex:
    """Maps block hashes to the workers that hold them.

    Used by one event loop. No method waits or does I/O. The cost of each method depends on its arguments, not
    on the size of the index.

    Each block has one mask of the worker incarnations that claim it. The AND of the masks along a chain gives
    the leading run of every worker, over as many blocks at a time as the same workers claim (`Claims`). For a
    worker that announces every k-th block, only those masks matter, and those of the k - 1 blocks after its
    run, because the last block of each of its chains is announced. An incarnation that has ended is masked
    out immediately. Its claims are removed gradually (`sweep`), and its bit is reused after that.
    """

    def __init__(self, *, max_expected_blocks: int = MAX_EXPECTED_BLOCKS) -> None:
        self.num_claims = 0  # (worker, tier, block) triples of present workers
        self.num_refused = 0  # claims that were ignored, because the worker does not have so many blocks
        self._holders: dict[str, _Holder] = {}
        self._by_slot: list[str] = []
        self._free_slots: list[int] = []  # a heap
        self._present = 0  # mask of the incarnations that have not ended
        self._by_interval: dict[int, int] = {}  # masks of these by `announce_every`
        self._tiers = {tier: Claims() for tier in Tier}
        self._other_tiers: list[Tier] = []  # tiers other than DEVICE that were used at least once
        self._ended: deque[tuple[int, dict[Tier, dict[BlockHash, None]]]] = (
            deque()
        )  # (slot, claims that are still in the masks)
        self._expecting: list[int] = []  # ended slots without claims, but with expectations that have not expired
        self._expected = ExpectedBlocks(max_expected_blocks)
        self.evictions = EvictionRecord()
        """Blocks that workers have evicted lately. The reader of their events records them."""

    # -- incarnations --------------------------------------------------------------------------------------------------

    def join(self, worker: WorkerRef, max_blocks: int = MAX_BLOCKS_PER_WORKER, announce_every: int = 1) -> None:
        """Add a worker incarnation, and drop an earlier one of the same worker.

        If this incarnation is known, only its `max_blocks` changes.
        max_blocks: size of its pool. Claims beyond that, per tier, are ignored.
        announce_every: of how many successive blocks of a chain it claims one; the last one is claimed, too.
        """
        known = self._holders.get(worker.worker_id)
        if known is not None:
            if known.worker.is_same_incarnation(worker):
                known.max_blocks = max_blocks
                return
            self.drop(known.worker)
        self._begin(worker, max_blocks, max(1, announce_every))

    def drop(self, worker: WorkerRef) -> None:
        """Remove a worker incarnation. Ignored if another one has replaced it."""
        holder = self._holder(worker)
        if holder is not None:
            self._end(holder)

    def reset(self, worker: WorkerRef) -> None:
        """Forget all claims of a worker, before a snapshot.

        If it had any, its expectations are dropped as well.
        """
        holder = self._holder(worker)
        if holder is not None and any(holder.held.values()):
            self._end(holder)
            self._begin(worker, holder.max_blocks, holder.announce_every)

    def sweep(self, max_claims: int) -> int:
        """Remove at most `max_claims` claims of ended incarnations.

        Returns the number removed; 0 if none is left.
        """
        left = max_claims
        while left and self._ended:
            slot, tiers = self._ended[0]
            for tier, held in tiers.items():
                swept = min(left, len(held))
                self._tiers[tier].toggle([held.popitem()[0] for _ in range(swept)], 1 << slot)
                left -= swept
            if not any(tiers.values()):
                self._ended.popleft()
                self._expecting.append(slot)
        for slot in [slot for slot in self._expecting if not self._expected.num_of(1 << slot)]:
            self._expecting.remove(slot)
            heappush(self._free_slots, slot)
        return max_claims - left

    # -- events of workers ---------------------------------------------------------------------------------------------

    def stored(self, worker: WorkerRef, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Add claims: the worker holds these blocks now.

        Ignored for an incarnation that has not joined. Known claims change nothing.
        """
        holder = self._holder(worker)
        if holder is None:
            return
        if tier is not Tier.DEVICE and tier not in self._other_tiers:
            self._other_tiers.append(tier)
        held = holder.held.setdefault(tier, {})
        max_new, new = holder.max_blocks - len(held), list[BlockHash]()
        for block_hash in hashes:
            if block_hash in held:
                continue
            if len(new) >= max_new:
                self.num_refused += 1
                continue
            held[block_hash] = None
            new.append(block_hash)
        self._tiers[tier].toggle(new, holder.bit)
        self.num_claims += len(new)
        self._expected.stored(holder.bit, hashes)
        self._sweep_after_change(len(hashes))

    def evicted(self, worker: WorkerRef, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Remove claims: the worker no longer holds these blocks in that tier.

        Unknown claims change nothing.
        """
        holder = self._holder(worker)
        held = holder.held.get(tier) if holder is not None else None
        if holder is None or held is None:
            return
        removed = [block_hash for block_hash in hashes if held.pop(block_hash, _ABSENT) is not _ABSENT]
        self._tiers[tier].toggle(removed, holder.bit)
        self.num_claims -= len(removed)
        self._sweep_after_change(len(hashes))

    # -- scheduling ----------------------------------------------------------------------------------------------------

    def expect(self, worker: WorkerRef, hashes: Sequence[BlockHash], until_s: float) -> None:
        """Expect a worker to hold these blocks soon, because a prompt that starts with them was placed there.

        They count until `until_s`, or until the last of them is stored; a chain is stored from its front.
        Ignored for an incarnation that has not joined.
        """
        holder = self._holder(worker)
        if holder is not None:
            self._expected.add(holder.bit, tuple(hashes), until_s)

    def overlaps(self, hashes: Sequence[BlockHash], now_s: float) -> Mapping[str, PrefixOverlap]:
        """Return the overlap of each worker with this chain, by worker id.

        Workers without the first block are left out.
        """
        has_other_tiers = bool(self._other_tiers)
        found: dict[str, PrefixOverlap] = {}
        for length, mask in self._runs(hashes, self._view_of(Tier) if has_other_tiers else self._device):
            overlap = PrefixOverlap(
                num_blocks=length, num_held_blocks=length, num_device_blocks=0 if has_other_tiers else length
            )
            for worker_id in self._ids(mask):
                found[worker_id] = overlap
        if has_other_tiers:
            for length, mask in self._runs(hashes, self._device):
                for worker_id in self._ids(mask):
                    found[worker_id] = replace(found[worker_id], num_device_blocks=length)
        if Tier.DISK in self._other_tiers:
            in_memory = {
                worker_id: length
                for length, mask in self._runs(hashes, self._view_of(_IN_MEMORY))
                for worker_id in self._ids(mask)
            }
            for worker_id, overlap in found.items():
                num_disk_blocks = overlap.num_held_blocks - in_memory.get(worker_id, 0)
                found[worker_id] = replace(overlap, num_disk_blocks=num_disk_blocks)
        done = 0
        for length, mask in reversed(self._expected.levels(hashes, now_s)):
            for worker_id in self._ids(mask & self._present & ~done):
                known = found.get(worker_id, _NOTHING)
                if length > known.num_blocks:
                    end = self._end_of_run(hashes, length, self._holders[worker_id])
                    found[worker_id] = replace(known, num_blocks=end)
            done |= mask
        return found

    # -- metrics -------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Number of (block, tier) entries, including those of ended incarnations that are not swept yet."""
        return sum(len(claims) for claims in self._tiers.values())

    @property
    def num_ended_claims(self) -> int:
        """Number of claims that are left to sweep."""
        return sum(len(held) for _, tiers in self._ended for held in tiers.values())

    def num_held(self, worker: WorkerRef) -> int:
        """Return the number of claims of a worker, over all tiers."""
        holder = self._holder(worker)
        return sum(len(held) for held in holder.held.values()) if holder is not None else 0

    # -- internal ------------------------------------------------------------------------------------------------------

    def _holder(self, worker: WorkerRef) -> _Holder | None:
        holder = self._holders.get(worker.worker_id)
        return holder if holder is not None and holder.worker.is_same_incarnation(worker) else None

    def _begin(self, worker: WorkerRef, max_blocks: int, announce_every: int) -> None:
        """Add an incarnation on the lowest free slot, so that masks stay short."""
        self.sweep(1)  # frees slots without claims whose expectations have expired
        if not self._free_slots:
            self._by_slot.append("")
            heappush(self._free_slots, len(self._by_slot) - 1)
        slot = heappop(self._free_slots)
        self._by_slot[slot] = worker.worker_id
        self._holders[worker.worker_id] = _Holder(worker, 1 << slot, max_blocks, announce_every)
        self._present |= 1 << slot
        self._by_interval[announce_every] = self._by_interval.get(announce_every, 0) | 1 << slot

    def _end(self, holder: _Holder) -> None:
        del self._holders[holder.worker.worker_id]
        self._present ^= holder.bit
        self._by_interval[holder.announce_every] ^= holder.bit
        if not self._by_interval[holder.announce_every]:
            del self._by_interval[holder.announce_every]
        self.num_claims -= sum(len(held) for held in holder.held.values())
        self._ended.append((holder.bit.bit_length() - 1, holder.held))

    def _sweep_after_change(self, num_changes: int) -> None:
        """Sweep in small parts after each change. This bounds the memory, and no single change takes long."""
        if self._ended or self._expecting:
            self.sweep(SWEPT_CLAIMS_PER_CHANGE * num_changes)

    def _runs(self, hashes: Sequence[BlockHash], view: "_View") -> list[tuple[int, int]]:
        """Return (length, mask of the present workers whose leading run has that length), each worker once.

        Workers without a run are left out.
        """
        runs: list[tuple[int, int]] = []
        for interval, present in self._by_interval.items():
            if interval == 1:
                runs += [run for run in _announced_runs(view.spans(hashes), present) if run[0]]
                continue
            for num_announced, mask in _announced_runs(view.spans(tuple(hashes[interval - 1 :: interval])), present):
                runs += _with_tails(hashes, num_announced * interval, interval, mask, view.mask_of)
        return runs

    @property
    def _device(self) -> "_View":
        claims = self._tiers[Tier.DEVICE]
        return _View(claims.spans, claims.mask_of)

    def _view_of(self, tiers: Iterable[Tier]) -> "_View":
        """Return the view over several tiers. Its spans are single blocks, because the tier can change within
        a chain."""
        claims = [self._tiers[tier] for tier in tiers if tier is Tier.DEVICE or tier in self._other_tiers]

        def mask_of(block_hash: BlockHash) -> int:
            mask = 0
            for of_tier in claims:
                mask |= of_tier.mask_of(block_hash)
            return mask

        return _View(lambda hashes: ((end, mask_of(each)) for end, each in enumerate(hashes, 1)), mask_of)

    def _end_of_run(self, hashes: Sequence[BlockHash], start: int, holder: _Holder) -> int:
        """Return the end of a worker's run that continues at `start` after expected blocks."""
        end, mask_of = start, self._view_of(Tier).mask_of
        for length in range(start + 1, len(hashes) + 1):
            if mask_of(hashes[length - 1]) & holder.bit:
                end = length
            elif length % holder.announce_every == 0:
                break
        return end

    def _ids(self, mask: int) -> list[str]:
        """Return the worker ids of the bits in `mask`."""
        by_slot, found = self._by_slot, []
        while mask:
            bit = mask & -mask
            found.append(by_slot[bit.bit_length() - 1])
            mask ^= bit
        return found


@dataclass(frozen=True, slots=True)
class _View:
    """The claims of one tier or of all tiers, see `Claims`."""

    spans: Callable[[Sequence[BlockHash]], Iterable[tuple[int, int]]]
    mask_of: Callable[[BlockHash], int]


def _announced_runs(spans: Iterable[tuple[int, int]], present: int) -> Iterator[tuple[int, int]]:
    """Yield (length, mask of the workers whose leading run has that length). Each worker appears once."""
    alive, length = present, 0
    for end, mask in spans:
        still = alive & mask
        if still != alive:
            yield length, alive ^ still
            alive = still
            if not alive:
                return
        length = end
    yield length, alive


def _with_tails(
    hashes: Sequence[BlockHash], start: int, interval: int, mask: int, mask_of: Callable[[BlockHash], int]
) -> Iterator[tuple[int, int]]:
    """Extend runs that end at `start` by the ends of chains before the next block that would be announced."""
    for length in range(min(len(hashes), start + interval - 1), start, -1):
        ending = mask_of(hashes[length - 1]) & mask
        if ending:
            yield length, ending
            mask ^= ending
            if not mask:
                return
    if start:
        yield start, mask
