"""Who uses which block of KV memory, and which content can be found again. Integers only; the memory itself
is the executor's.

Each block is in exactly one state: `receiving` or `quarantined` while a read of another worker's memory may
write to it, else `used` while a sequence refers to it or a transfer pins it, else `cached` if its content is
known by hash, else `free`. What was pulled out of another worker's cache is a *copy* until a second request
has used it here: the first cached content to go (`idle_blocks`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import islice

from baton.core.cluster.worker_report import BlockCounts
from baton.core.interfaces import GenerationTable
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_events import KvEventKind
from baton.engine.kv_cache.eviction import EvictionQueue
from baton.engine.state.require import require


class BlockFill(Enum):
    """Whether a read of another worker's memory stands between a block and its use. VOID: that read came to
    nothing, and the sequence that was to use the block has not let go of it yet."""

    NONE = "none"
    RECEIVING = "receiving"
    QUARANTINED = "quarantined"
    VOID = "void"


class BlockPool:
    """The blocks of one worker. The engine owns the references; transfers pin, land and quarantine
    (`PinPool`, `LandingPool`).

    Wrong use (a reference to a free block, a receiving that is none) raises ValueError and
    leaves that block as it was.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int, generation_table: GenerationTable) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._generation_table = generation_table
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._hash = [NO_HASH] * num_blocks
        self._fill = [BlockFill.NONE] * num_blocks
        self._idle = EvictionQueue(num_blocks)
        self._by_hash: dict[BlockHash, int] = {}
        self._same_content: dict[BlockHash, list[int]] = {}  # further blocks with that content, all of them used
        self._num_receiving = 0
        self._num_quarantined = 0
        self._held_for_others = 0
        self._changes: dict[BlockHash, KvEventKind] = {}  # net since last taken, so never more than twice the pool
        self._on_freed: list[Callable[[], None]] = []
        self._steps_launched = 0
        self._steps_finished = 0
        self._fenced: OrderedDict[int, int] = (
            OrderedDict()
        )  # idle block -> last step that may still use it; oldest first

    # -- counts -------------------------------------------------------------------------------------------------------------------------

    @property
    def num_allocatable(self) -> int:
        """Blocks that can be handed out once no step is in flight: free ones, and cached ones that nobody
        uses."""
        return len(self._idle)

    @property
    def num_copies(self) -> int:
        """Copies that are here, and those that are being read."""
        return self._idle.num_copies

    @property
    def num_cold_copies(self) -> int:
        """Those of them that nobody uses now: `drop_copies` can make as many free."""
        return self._idle.num_cold

    @property
    def held_for_others(self) -> int:
        """Blocks that only transfers keep."""
        return self._held_for_others

    def counts(self) -> BlockCounts:
        return BlockCounts(
            total=self.num_blocks,
            free=self._idle.num_free,
            cached=self._idle.num_cached,
            used=self.num_blocks - self.num_allocatable - self._num_receiving - self._num_quarantined,
            receiving=self._num_receiving,
            quarantined=self._num_quarantined,
            held_for_others=self._held_for_others,
        )

    def num_refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these nobody uses now."""
        return sum(self._is_idle(b) for b in block_ids)

    def is_readable(self, block_id: int) -> bool:
        """Whether no read stands between this block and its use."""
        return self._fill[block_id] is BlockFill.NONE

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever blocks may have become allocatable, whether a sequence or a transfer freed them."""
        self._on_freed.append(callback)

    # -- handing out and taking back ----------------------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks to compute into, each with a new life and one reference: none that a step in flight may
        still read or write. None, and nothing changed, if there are not so many."""
        chosen = list(islice((b for b in self._idle if b not in self._fenced), num_blocks))
        if len(chosen) < num_blocks:
            return None
        for block_id in chosen:
            self._idle.take(block_id)
            if self._hash[block_id] != NO_HASH:
                self._forget_content(block_id)
            self._generation_table.begin_generation(block_id)
            self._refs[block_id] = 1
        return chosen

    def allocate_receiving(self, num_blocks: int) -> list[int] | None:
        """As `allocate`, to read into."""
        chosen = self.allocate(num_blocks)
        for block_id in chosen or ():
            self._fill[block_id] = BlockFill.RECEIVING
        self._num_receiving += len(chosen or ())
        return chosen

    def ref(self, block_ids: Iterable[int]) -> None:
        """One more reference on each; they must be used or cached."""
        for block_id in block_ids:
            self._take(block_id)
            self._count(block_id, refs=1)

    def unref(self, block_ids: Sequence[int]) -> None:
        """One reference less on each. Given in a sequence's order they are released from the last on: a chain
        is evicted from its tail."""
        for block_id in reversed(block_ids):
            if not self._refs[block_id]:
                raise ValueError(f"block {block_id} has no reference to give back")
            self._count(block_id, refs=-1)
            self._release(block_id)
        self._notify_freed()

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep these for a transfer, also when their sequence is over; they must be used or cached."""
        for block_id in block_ids:
            if not self.is_readable(block_id):
                raise ValueError(f"block {block_id} is {self._fill[block_id].value}; it cannot be pinned")
            self._take(block_id)
            self._count(block_id, pins=1)

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            if not self._pins[block_id]:
                raise ValueError(f"block {block_id} has no pin to give back")
            self._count(block_id, pins=-1)
            self._release(block_id)
        self._notify_freed()

    def generation(self, block_id: int) -> int:
        return self._generation_table.generation(block_id)

    # -- content ------------------------------------------------------------------------------------------------------------------------

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks that hold the leading ones of `hashes`, without taking a reference."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_cached(self, hashes: Iterable[BlockHash]) -> int:
        """How many leading blocks are here now. Nothing keeps them here."""
        return len(self.lookup(hashes))

    def match(self, hashes: Iterable[BlockHash], max_blocks: int) -> list[int]:
        """At most `max_blocks` leading blocks, with a reference on each."""
        found = self.lookup(islice(hashes, max_blocks))
        self.ref(found)
        return found

    def set_hash(self, block_id: int, block_hash: BlockHash) -> None:
        """The block is full, computed and final: others may share it, and nobody writes it any more."""
        is_in_use = self.is_readable(block_id) and (self._refs[block_id] or self._pins[block_id])
        if self._hash[block_id] != NO_HASH or block_hash == NO_HASH or not is_in_use:
            raise ValueError(f"block {block_id} cannot take hash {block_hash.hex()}: it has one or is not in use")
        self._publish(block_id, block_hash)

    def hash_of(self, block_id: int) -> BlockHash:
        """NO_HASH: its content is not (yet) shared."""
        return self._hash[block_id]

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """The content of these is in doubt, and no other sequence uses it: it is not found by hash any more,
        and as the blocks' life ends no read of them is proven."""
        for block_id in block_ids:
            if self._hash[block_id] != NO_HASH:
                self._forget_content(block_id)
            self._generation_table.begin_generation(block_id)

    def hashes(self) -> list[BlockHash]:
        """All content that can be found here, for a snapshot."""
        return list(self._by_hash)

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        """What has come (STORED) and gone (EVICTED) since the last call, net: content that came and went
        again is not named."""
        events = [(kind, block_hash) for block_hash, kind in self._changes.items()]
        self._changes.clear()
        return events

    # -- copies -------------------------------------------------------------------------------------------------------------------------

    def mark_copies(self, block_ids: Sequence[int]) -> None:
        """What lands in these is a copy: until a second request uses it, or until it is not here any more."""
        for block_id in block_ids:
            if self._fill[block_id] is not BlockFill.RECEIVING:
                raise ValueError(f"block {block_id} is not receiving; it cannot become a copy")
            self._idle.mark_copy(block_id)

    def count_use(self, block_ids: Iterable[int]) -> None:
        """A request has found these in the cache. A copy's first use is that of the request that it was
        brought for; the second proves it worth keeping: from then on it is cached like any other."""
        for block_id in block_ids:
            self._idle.count_use(block_id)

    def drop_copies(self, max_blocks: int) -> int:
        """At most so many idle copies become free, the least recently used ones; returns how many."""
        dropped = self._idle.coldest(max_blocks)
        for block_id in dropped:
            self._idle.take(block_id)
            self._forget_content(block_id)
            self._idle.put(block_id, has_content=False)
        return len(dropped)

    # -- receiving (LandingPool) ----------------------------------------------------------------------------------------------------------

    def mark_received(self, block_id: int, block_hash: BlockHash) -> None:
        """See LandingPool. If its sequence is over the block stays as cache, or is free if it has no hash."""
        self._end_receiving(block_id, BlockFill.NONE)
        if block_hash != NO_HASH:
            self._publish(block_id, block_hash)
        else:
            self._idle.end_copy(block_id)  # another request will not find it
        self._release(block_id)
        self._notify_freed()

    def drop_receiving(self, block_ids: Sequence[int]) -> None:
        """See LandingPool. While its sequence has not let go, a block stays used."""
        for block_id in reversed(block_ids):
            self._end_receiving(block_id, BlockFill.VOID)
            self._idle.end_copy(block_id)
            self._release(block_id)
        self._notify_freed()

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """See LandingPool."""
        for block_id in block_ids:
            self._end_receiving(block_id, BlockFill.QUARANTINED)
            self._num_quarantined += 1

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        """See LandingPool."""
        for block_id in reversed(block_ids):
            if self._fill[block_id] is not BlockFill.QUARANTINED:
                raise ValueError(f"block {block_id} is not quarantined")
            self._fill[block_id] = BlockFill.VOID
            self._idle.end_copy(block_id)
            self._num_quarantined -= 1
            self._release(block_id)
        self._notify_freed()

    # -- fence --------------------------------------------------------------------------------------------------------------------------

    def step_launched(self) -> None:
        """From now on the device may read and write blocks that are in use now, until as many steps have
        finished."""
        self._steps_launched += 1

    def step_withdrawn(self) -> None:
        """The step that was launched last has no result: it was not run, or has ended."""
        if self._steps_finished == self._steps_launched:
            raise ValueError("no step is in flight")
        self._steps_launched -= 1
        for block_id, last_step in self._fenced.items():
            self._fenced[block_id] = min(last_step, self._steps_launched)
        self._lift_fence()

    def step_finished(self) -> None:
        """The oldest step in flight has completed on the device."""
        if self._steps_finished == self._steps_launched:
            raise ValueError("no step is in flight")
        self._steps_finished += 1
        self._lift_fence()

    # -- invariants ---------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError naming the first invariant that does not hold. Reads the whole pool: for
        tests and audits."""
        idle = {b for b in range(self.num_blocks) if self._is_idle(b)}
        require(self.counts().is_balanced, f"counts do not add up: {self.counts()}")
        coming = {b for b in range(self.num_blocks) if self._fill[b] in (BlockFill.RECEIVING, BlockFill.QUARANTINED)}
        self._idle.check(
            idle=idle, contents={b for b in range(self.num_blocks) if self._hash[b] != NO_HASH}, coming=coming
        )
        require(self._fenced.keys() <= idle, "a block in use is fenced")
        require(
            not self._fenced or self._steps_launched > self._steps_finished,
            "a block is fenced and no step is in flight",
        )
        require(
            self._held_for_others == sum(self._is_held(b) for b in range(self.num_blocks)), "held_for_others is wrong"
        )
        require(self._num_receiving == self._fill.count(BlockFill.RECEIVING), "receiving count is wrong")
        require(self._num_quarantined == self._fill.count(BlockFill.QUARANTINED), "quarantined count is wrong")
        for b in range(self.num_blocks):
            require(self._refs[b] >= 0 and self._pins[b] >= 0, f"block {b} has negative counts")
            require(
                self.is_readable(b) or (self._hash[b] == NO_HASH and not self._pins[b]),
                f"block {b} is seen before it has landed",
            )
            require(self._fill[b] is not BlockFill.VOID or self._refs[b] > 0, f"block {b} is void and nobody's")
        found = [*self._by_hash.items(), *((h, b) for h, more in self._same_content.items() for b in more)]
        require(all(self._hash[b] == h for h, b in found), "a hash finds a block of other content")
        require(len(found) == sum(h != NO_HASH for h in self._hash), "a block's hash is not found, or twice")
        require(
            not any(self._is_idle(b) for more in self._same_content.values() for b in more),
            "an idle block repeats another's content",
        )

    # -- inside -------------------------------------------------------------------------------------------------------------------------

    def _is_idle(self, block_id: int) -> bool:
        return not self._refs[block_id] and not self._pins[block_id] and self.is_readable(block_id)

    def _is_held(self, block_id: int) -> bool:
        return self._pins[block_id] > 0 and not self._refs[block_id]

    def _take(self, block_id: int) -> None:
        """Before a cached block is used again. Raises ValueError if it is free."""
        if self._is_idle(block_id):
            if self._idle.is_free(block_id):
                raise ValueError(f"block {block_id} is free; its content is not there")
            self._idle.take(block_id)
            self._fenced.pop(block_id, None)  # it has a hash, so no step writes it

    def _release(self, block_id: int) -> None:
        """After a reference, a pin or a read has ended: the block may be idle now."""
        if (
            self._refs[block_id]
            or self._pins[block_id]
            or self._fill[block_id] in (BlockFill.RECEIVING, BlockFill.QUARANTINED)
        ):
            return
        self._fill[block_id] = BlockFill.NONE
        if self._hash[block_id] != NO_HASH and self._hash[block_id] in self._same_content:
            self._forget_content(block_id)  # another block in use has it too
        self._idle.put(block_id, has_content=self._hash[block_id] != NO_HASH)
        if self._steps_launched > self._steps_finished:
            self._fenced[block_id] = self._steps_launched

    def _publish(self, block_id: int, block_hash: BlockHash) -> None:
        self._hash[block_id] = block_hash
        self._generation_table.set_hash(block_id, block_hash)
        if block_hash in self._by_hash:
            self._same_content.setdefault(block_hash, []).append(block_id)
            return
        self._by_hash[block_hash] = block_id
        self._changed(block_hash, KvEventKind.STORED)

    def _forget_content(self, block_id: int) -> None:
        """The block has no hash any more; the content is gone from here if no other block has it."""
        block_hash, self._hash[block_id] = self._hash[block_id], NO_HASH
        self._idle.end_copy(block_id)
        others = [b for b in (self._by_hash[block_hash], *self._same_content.pop(block_hash, ())) if b != block_id]
        if others:
            self._by_hash[block_hash] = others[0]
            if others[1:]:
                self._same_content[block_hash] = others[1:]
        else:
            del self._by_hash[block_hash]
            self._changed(block_hash, KvEventKind.EVICTED)

    def _lift_fence(self) -> None:
        while self._fenced and next(iter(self._fenced.values())) <= self._steps_finished:
            self._fenced.popitem(last=False)

    def _changed(self, block_hash: BlockHash, kind: KvEventKind) -> None:
        if self._changes.pop(block_hash, kind) is kind:
            self._changes[block_hash] = kind

    def _end_receiving(self, block_id: int, to: BlockFill) -> None:
        if self._fill[block_id] is not BlockFill.RECEIVING:
            raise ValueError(f"block {block_id} is not receiving")
        self._fill[block_id] = to
        self._num_receiving -= 1

    def _count(self, block_id: int, *, refs: int = 0, pins: int = 0) -> None:
        was_held = self._is_held(block_id)
        self._refs[block_id] += refs
        self._pins[block_id] += pins
        self._held_for_others += self._is_held(block_id) - was_held

    def _notify_freed(self) -> None:
        for callback in self._on_freed:
            callback()
