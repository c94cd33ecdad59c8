"""Which worker holds which leading blocks of a prompt, by events; and will soon, by what has been placed
there."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import Tier
from baton.prefix_index.block_claims import Claims
from baton.prefix_index.expected_blocks import MAX_EXPECTED_BLOCKS, ExpectedBlocks

MAX_BLOCKS_PER_LIFE = 16_777_216
SWEPT_PER_CHANGE = 2
"""For each block that comes or goes so many claims of ended lives are cleared away: they are gone long before
new ones fill the memory."""

_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOverlap:
    """How many leading blocks of a prompt a worker has. `num_blocks`: it holds them or soon will;
    `num_held_blocks`: really held now, in whatever tier (only those can be pulled); `num_device_blocks`: of
    these, from the front, in the device's memory."""

    num_blocks: int
    num_held_blocks: int
    num_device_blocks: int


_NOTHING = PrefixOverlap(num_blocks=0, num_held_blocks=0, num_device_blocks=0)


class _Life:
    """One life of a worker. `bit` stands for it in masks; `held`: what it claims, by tier (a dict is a
    smaller set)."""

    __slots__ = ("bit", "held", "max_blocks", "worker")

    def __init__(self, worker: WorkerRef, bit: int, max_blocks: int) -> None:
        self.worker = worker
        self.bit = bit
        self.max_blocks = max_blocks
        self.held: dict[Tier, dict[BlockHash, None]] = {}


class PrefixIndex:
    """Single owner: an event loop. Nothing here waits or does I/O, and every method is bounded by what it is
    given, not by what is held.

    A block has one mask of the lives that claim it. The leading run of every worker at once is then the AND
    along the chain, over as many blocks at a time as the same lives claim side by side (`Claims`). A life
    that ends is masked out at once, and its claims are cleared away little by little (`sweep`); its bit is
    not used again before that.
    """

    def __init__(self, *, max_expected_blocks: int = MAX_EXPECTED_BLOCKS) -> None:
        self.num_claims = 0
        """(worker, tier, block) triples of living workers."""
        self.num_refused = 0
        """Claims not believed, because the worker has not so many blocks."""
        self._lives: dict[str, _Life] = {}
        self._by_slot: list[str] = []
        self._free_slots: list[int] = []  # a heap
        self._living = 0  # mask
        self._tiers = {tier: Claims() for tier in Tier}
        self._below: list[Tier] = []  # other tiers that have ever been used
        self._ended: deque[tuple[int, dict[Tier, dict[BlockHash, None]]]] = deque()  # slot, claims still in the masks
        self._cooling: list[int] = []  # slots without claims of which something is expected still
        self._expected = ExpectedBlocks(max_expected_blocks)

    # -- lives ---------------------------------------------------------------------------------------------------------

    def join(self, worker: WorkerRef, max_blocks: int = MAX_BLOCKS_PER_LIFE) -> None:
        """A life begins, which ends any other of that worker. `max_blocks`: the size of its pool; it is
        believed no more in one tier."""
        known = self._lives.get(worker.worker_id)
        if known is not None:
            if known.worker.is_same_incarnation(worker):
                known.max_blocks = max_blocks
                return
            self.drop(known.worker)
        self._begin(worker, max_blocks)

    def drop(self, worker: WorkerRef) -> None:
        """That life is over, if it still is the worker's."""
        life = self._life(worker)
        if life is not None:
            self._end(life)

    def reset(self, worker: WorkerRef) -> None:
        """That life goes on, but holds nothing that we know of. What is expected of one that held something
        is given up as well."""
        life = self._life(worker)
        if life is not None and any(life.held.values()):
            self._end(life)
            self._begin(worker, life.max_blocks)

    def sweep(self, max_claims: int) -> int:
        """Clear away at most so many claims of lives that have ended. Returns how many were; 0: nothing is
        left."""
        left = max_claims
        while left and self._ended:
            slot, tiers = self._ended[0]
            for tier, held in tiers.items():
                swept = min(left, len(held))
                self._tiers[tier].flip([held.popitem()[0] for _ in range(swept)], 1 << slot)
                left -= swept
            if not any(tiers.values()):
                self._ended.popleft()
                self._cooling.append(slot)
        for slot in [slot for slot in self._cooling if not self._expected.num_of(1 << slot)]:
            self._cooling.remove(slot)
            heappush(self._free_slots, slot)
        return max_claims - left

    # -- what workers say ----------------------------------------------------------------------------------------------

    def stored(self, worker: WorkerRef, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """The worker holds these now. Ignored for a life that has not joined; a claim that is known already
        changes nothing."""
        life = self._life(worker)
        if life is None:
            return
        if tier is not Tier.DEVICE and tier not in self._below:
            self._below.append(tier)
        held = life.held.setdefault(tier, {})
        room, new = life.max_blocks - len(held), list[BlockHash]()
        for block_hash in hashes:
            if block_hash in held:
                continue
            if len(new) >= room:
                self.num_refused += 1
                continue
            held[block_hash] = None
            new.append(block_hash)
        self._tiers[tier].flip(new, life.bit)
        self.num_claims += len(new)
        self._expected.stored(life.bit, hashes)
        self._tidy(len(hashes))

    def evicted(self, worker: WorkerRef, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """The worker holds these no more in that tier. What it never claimed changes nothing."""
        life = self._life(worker)
        held = life.held.get(tier) if life is not None else None
        if life is None or held is None:
            return
        gone = [block_hash for block_hash in hashes if held.pop(block_hash, _ABSENT) is not _ABSENT]
        self._tiers[tier].flip(gone, life.bit)
        self.num_claims -= len(gone)
        self._tidy(len(hashes))

    # -- what schedulers ask and say -----------------------------------------------------------------------------------

    def expect(self, worker: WorkerRef, hashes: Sequence[BlockHash], until_s: float) -> None:
        """A prompt that begins with these blocks was placed there: they count as held until `until_s`, or
        until the last of them is stored (a chain is stored from its front). Ignored for a life that has not
        joined."""
        life = self._life(worker)
        if life is not None:
            self._expected.add(life.bit, tuple(hashes), until_s)

    def overlaps(self, hashes: Sequence[BlockHash], now_s: float) -> Mapping[str, PrefixOverlap]:
        """What each living worker has of this chain, by its id; only workers that have the first block."""
        below = self._below
        found: dict[str, PrefixOverlap] = {}
        for length, mask in self._runs(
            self._spans_of_any_tier(hashes) if below else self._tiers[Tier.DEVICE].spans(hashes)
        ):
            overlap = PrefixOverlap(num_blocks=length, num_held_blocks=length, num_device_blocks=0 if below else length)
            for worker_id in self._ids(mask):
                found[worker_id] = overlap
        if below:
            for length, mask in self._runs(self._tiers[Tier.DEVICE].spans(hashes)):
                for worker_id in self._ids(mask):
                    held = found[worker_id].num_held_blocks
                    found[worker_id] = PrefixOverlap(num_blocks=held, num_held_blocks=held, num_device_blocks=length)
        done = 0
        for length, mask in reversed(self._expected.levels(hashes, now_s)):
            for worker_id in self._ids(mask & self._living & ~done):
                known = found.get(worker_id, _NOTHING)
                if length > known.num_blocks:
                    found[worker_id] = PrefixOverlap(
                        num_blocks=self._end_of_run(hashes, length, self._lives[worker_id].bit),
                        num_held_blocks=known.num_held_blocks,
                        num_device_blocks=known.num_device_blocks,
                    )
            done |= mask
        return found

    # -- what metrics ask ----------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Entries by content and tier, those of lives that are not swept yet included."""
        return sum(len(claims) for claims in self._tiers.values())

    @property
    def num_ended_claims(self) -> int:
        """What is left to sweep."""
        return sum(len(held) for _, tiers in self._ended for held in tiers.values())

    @property
    def num_expected_blocks(self) -> int:
        return self._expected.num_blocks

    def num_held(self, worker: WorkerRef) -> int:
        """Claims of one life, all tiers together."""
        life = self._life(worker)
        return sum(len(held) for held in life.held.values()) if life is not None else 0

    # -- inside --------------------------------------------------------------------------------------------------------

    def _life(self, worker: WorkerRef) -> _Life | None:
        life = self._lives.get(worker.worker_id)
        return life if life is not None and life.worker.is_same_incarnation(worker) else None

    def _begin(self, worker: WorkerRef, max_blocks: int) -> None:
        """On the lowest free slot: masks stay as short as they can."""
        self.sweep(1)  # a slot whose time is over is free then
        if not self._free_slots:
            self._by_slot.append("")
            heappush(self._free_slots, len(self._by_slot) - 1)
        slot = heappop(self._free_slots)
        self._by_slot[slot] = worker.worker_id
        self._lives[worker.worker_id] = _Life(worker, 1 << slot, max_blocks)
        self._living |= 1 << slot

    def _end(self, life: _Life) -> None:
        del self._lives[life.worker.worker_id]
        self._living ^= life.bit
        self.num_claims -= sum(len(held) for held in life.held.values())
        self._ended.append((life.bit.bit_length() - 1, life.held))

    def _tidy(self, num_changes: int) -> None:
        """A little after each change: memory has a bound, and no change takes long."""
        if self._ended or self._cooling:
            self.sweep(SWEPT_PER_CHANGE * num_changes)

    def _runs(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """(length, mask of the living whose leading run is that long), each worker once, those with no run
        left out. `spans`: see `Claims.spans`."""
        runs: list[tuple[int, int]] = []
        alive, length = self._living, 0
        for end, mask in spans:
            still = alive & mask
            if still != alive:
                if length:
                    runs.append((length, alive ^ still))
                alive = still
                if not alive:
                    return runs
            length = end
        return [*runs, (length, alive)] if length else []

    def _spans_of_any_tier(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """Block by block: what lies in which tier changes in the middle of a chain."""
        for length, block_hash in enumerate(hashes, 1):
            yield length, self._mask_of(block_hash)

    def _mask_of(self, block_hash: BlockHash) -> int:
        """Who holds the block in any tier."""
        mask = self._tiers[Tier.DEVICE].mask_of(block_hash)
        for tier in self._below:
            mask |= self._tiers[tier].mask_of(block_hash)
        return mask

    def _end_of_run(self, hashes: Sequence[BlockHash], start: int, bit: int) -> int:
        """Where the run of one worker ends that holds, or will, everything before `start`."""
        while start < len(hashes) and self._mask_of(hashes[start]) & bit:
            start += 1
        return start

    def _ids(self, mask: int) -> list[str]:
        by_slot, found = self._by_slot, []
        while mask:
            bit = mask & -mask
            found.append(by_slot[bit.bit_length() - 1])
            mask ^= bit
        return found
