"""The slots of a tier that peers may read: generations, content by hash, pins and the order of eviction.

Each slot is in exactly one state:

- `filling` while a copy from the device writes to it;
- otherwise `held` if it has content: pinned while something reads it, else idle;
- otherwise `lost` while something still reads content that was discarded;
- otherwise `free`.

Free slots are reallocated first, then slots with content in the order of an `EvictionOrder`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from baton.core.interfaces import GenerationTable
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_events import KvEventKind
from baton.engine.retention.eviction_order import EvictionOrder, ReuseLruOrder
from baton.engine.state.require import require
from baton.engine.tiers.kv_tier import BlockToStore, TierCounts

FIRST_USE_SHARE = 0.25
"""Share of the slots that content without a second use keeps. A conversation's blocks have it until the next
turn."""


class TierSlots:
    """The slots of one tier. Implements `core.interfaces.PinPool`, so that peers can hold leases on slots.

    Used from one event loop. Wrong use raises ValueError and changes nothing.
    """

    def __init__(self, num_slots: int, generation_table: GenerationTable) -> None:
        self.num_slots = num_slots
        self._generation_table = generation_table
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        self._idle: EvictionOrder = ReuseLruOrder(num_slots, FIRST_USE_SHARE)  # slots with content
        self._filling: dict[int, BlockToStore] = {}
        self._content: dict[int, BlockToStore] = {}
        self._by_hash: dict[BlockHash, int] = {}  # content and what is being filled
        self._pins: dict[int, int] = {}
        self._announced: dict[BlockHash, None] = {}
        self._changes: dict[BlockHash, KvEventKind] = {}
        self._on_change: list[Callable[[BlockHash], None]] = []
        self._on_evicted: list[Callable[[BlockHash], None]] = []

    def order_by(self, order: EvictionOrder) -> None:
        """Evict content in this order from now on. Raises ValueError if there is some."""
        if len(self._idle) or len(order):
            raise ValueError("the order of eviction cannot change while slots have content")
        self._idle = order

    def on_change(self, callback: Callable[[BlockHash], None]) -> None:
        """Call `callback` with the hash of content that can be loaded now, or that is gone."""
        self._on_change.append(callback)

    def on_evicted(self, callback: Callable[[BlockHash], None]) -> None:
        """Call `callback` with the hash of content that made room for other content."""
        self._on_evicted.append(callback)

    def copy_changed(self, block_hash: BlockHash) -> None:
        """Record that the device has content now, or has it no more."""
        slot = self._by_hash.get(block_hash)
        if slot is not None and slot in self._idle:
            self._idle.copy_changed(slot)

    # -- counts and content ----------------------------------------------------------------------------------------

    def counts(self) -> TierCounts:
        """Return the number of slots in each state."""
        free, held = len(self._free), len(self._content)
        return TierCounts(total=self.num_slots, free=free, held=held, busy=self.num_slots - free - held)

    @property
    def has_free(self) -> bool:
        """True if a slot has no content, and nothing uses it."""
        return bool(self._free)

    def slot_of(self, block_hash: BlockHash) -> int | None:
        """Return the slot that holds the content; None if there is none, or if it is still being filled."""
        slot = self._by_hash.get(block_hash)
        return slot if slot in self._content else None

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the slots of the longest known prefix of `hashes`."""
        found: list[int] = []
        for block_hash in hashes:
            slot = self.slot_of(block_hash)
            if slot is None:
                break
            found.append(slot)
        return found

    def hash_of(self, slot: int) -> BlockHash:
        """Return the hash of a slot's content; NO_HASH if it has none."""
        content = self._content.get(slot)
        return NO_HASH if content is None else content.block_hash

    def has_content(self, slot: int) -> bool:
        """Return True if a slot has content."""
        return slot in self._content

    def all_hashes(self) -> Iterator[BlockHash]:
        """Yield the hashes of all content."""
        return (content.block_hash for content in self._content.values())

    def content_of(self, slot: int) -> BlockToStore:
        """Return the content of a slot. Raises KeyError if it has none."""
        return self._content[slot]

    def hashes_of_tenant(self, tenant_root: BlockHash) -> list[BlockHash]:
        """Return the hashes of all content of a tenant, or of one that is not known.

        Content that is being filled counts.
        """
        known = (
            self._content[slot] if slot in self._content else self._filling[slot] for slot in self._by_hash.values()
        )
        return [content.block_hash for content in known if content.tenant_root in (tenant_root, NO_HASH)]

    def announced_hashes(self) -> list[BlockHash]:
        """Return the hashes of all announced content."""
        return list(self._announced)

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        """Return the net changes of announced content since the last call."""
        events = [(kind, block_hash) for block_hash, kind in self._changes.items()]
        self._changes.clear()
        return events

    # -- filling ---------------------------------------------------------------------------------------------------

    def restore(self, slot: int, block: BlockToStore) -> None:
        """Give a free slot the content that an earlier process has left there. Content that was restored
        first is evicted first. Raises ValueError for a slot that is not free, or for known content."""
        if slot not in self._free or block.block_hash in self._by_hash:
            raise ValueError(f"slot {slot} is not free, or its content is in another slot; it cannot be restored")
        del self._free[slot]
        self._generation_table.begin_generation(slot)
        self._generation_table.set_hash(slot, block.block_hash)
        self._content[slot] = block
        self._by_hash[block.block_hash] = slot
        self._changed(block, KvEventKind.STORED)
        self._release(slot)

    def begin_fill(self, blocks: Sequence[BlockToStore]) -> dict[int, BlockToStore]:
        """Reallocate slots to copy blocks into. Returns the block of each slot.

        Content that is known, or being filled, is left out. So are the last blocks if too few slots are idle.
        """
        chosen: dict[int, BlockToStore] = {}
        for block in blocks:
            if block.block_hash in self._by_hash:
                continue
            slot = self._next_idle()
            if slot is None:
                break
            self._take(slot)
            if slot in self._content:
                self._evict(slot)
            self._generation_table.begin_generation(slot)
            self._filling[slot] = chosen[slot] = block
            self._by_hash[block.block_hash] = slot
        return chosen

    def end_fill(self, slots: Iterable[int], *, is_complete: bool) -> int:
        """Publish the content of slots whose copy has ended, or drop it if the copy failed.

        Content that was discarded meanwhile is dropped, too. Returns the number of slots that have content.
        """
        num_filled = 0
        for slot in slots:
            block = self._filling.pop(slot, None)
            if block is None:
                raise ValueError(f"slot {slot} is not being filled")
            if self._by_hash.get(block.block_hash) == slot:
                if is_complete:
                    self._generation_table.set_hash(slot, block.block_hash)
                    self._content[slot] = block
                    self._changed(block, KvEventKind.STORED)
                    num_filled += 1
                    for callback in self._on_change:
                        callback(block.block_hash)
                else:
                    del self._by_hash[block.block_hash]
            self._release(slot)
        return num_filled

    def is_wanted(self, slot: int) -> bool:
        """Return False if the content that a slot is being filled with was discarded.

        Raises KeyError for a slot that is not being filled.
        """
        return self._by_hash.get(self._filling[slot].block_hash) == slot

    def discard(self, block_hash: BlockHash) -> None:
        """Drop content, or what is being filled with it. Reads of it fail their validation."""
        slot = self._by_hash.get(block_hash)
        if slot is None:
            return
        if slot in self._filling:
            del self._by_hash[block_hash]
            return
        is_idle = slot not in self._pins
        if is_idle:
            self._take(slot)
        self._forget(slot)
        self._generation_table.begin_generation(slot)
        if is_idle:
            self._release(slot)

    # -- reading (PinPool) -----------------------------------------------------------------------------------------

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep the content of slots for a reader. Raises ValueError for a slot without content."""
        if missing := [slot for slot in block_ids if slot not in self._content]:
            raise ValueError(f"slots {missing} have no content; they cannot be pinned")
        for slot in block_ids:
            if slot not in self._pins:
                self._take(slot)
            self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Undo one `pin` of each slot. The last slots become the first to be evicted.

        Raises ValueError for a slot without pins.
        """
        for slot in reversed(block_ids):
            if slot not in self._pins:
                raise ValueError(f"slot {slot} has no pin; it cannot be unpinned")
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                self._release(slot)

    def generation(self, block_id: int) -> int:
        """Return the current generation of a slot's content."""
        return self._generation_table.generation(block_id)

    def count_use(self, slots: Iterable[int]) -> None:
        """Record that a request has used the content of slots: it is reused now."""
        for slot in slots:
            content = self._content.get(slot)
            if content is None or content.is_reused:
                continue
            self._content[slot] = replace(content, is_reused=True)
            if slot in self._idle:
                self._idle.remove(slot)
                self._release(slot)

    def announce(self, block_hash: BlockHash) -> int | None:
        """Announce content, or what is being filled with it. Unknown content is ignored.

        Returns the slot whose content was not announced before; None if there is none, or if it is being
        filled.
        """
        slot = self._by_hash.get(block_hash)
        if slot is None:
            return None
        if slot in self._filling:
            self._filling[slot] = replace(self._filling[slot], is_announced=True)
            return None
        if self._content[slot].is_announced:
            return None
        self._content[slot] = replace(self._content[slot], is_announced=True)
        self._changed(self._content[slot], KvEventKind.STORED)
        return slot

    # -- invariants ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check all invariants. For tests. Raises AssertionError naming the first that does not hold."""
        idle = [*self._free, *self._idle.ids()]
        require(len(set(idle)) == len(idle), "a slot is queued twice")
        require(not self._filling.keys() & self._content.keys(), "a slot that is being filled has content")
        require(not self._filling.keys() & self._pins.keys(), "a slot that is being filled is pinned")
        require(not self._free.keys() & self._content.keys(), "a free slot has content")
        require(
            set(idle) == set(range(self.num_slots)) - self._filling.keys() - self._pins.keys(),
            "the idle slots are not those that nothing writes or reads",
        )
        require(self._content.keys() >= set(self._idle.ids()), "a slot without content is queued as content")
        for slot, content in self._content.items():
            require(self._by_hash.get(content.block_hash) == slot, f"the content of slot {slot} is not found")
        announced = {content.block_hash for content in self._content.values() if content.is_announced}
        require(self._announced.keys() == announced, "the announced content is not that of the slots")
        known = self._content | self._filling
        require(
            all(known[slot].block_hash == block_hash for block_hash, slot in self._by_hash.items()),
            "a hash leads to a slot with another hash",
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _next_idle(self) -> int | None:
        """Return the slot to reallocate next; None if no slot is idle."""
        if self._free:
            return next(iter(self._free))
        return next(iter(self._idle.first(1)), None)

    def _take(self, slot: int) -> None:
        if slot in self._free:
            del self._free[slot]
        elif slot in self._idle:
            self._idle.remove(slot)

    def _release(self, slot: int) -> None:
        content = self._content.get(slot)
        if content is None:
            self._free[slot] = None
        else:
            self._idle.put(slot, content.use._replace(is_reused=content.is_reused))

    def _evict(self, slot: int) -> None:
        block_hash = self._content[slot].block_hash
        self._forget(slot)
        for callback in self._on_evicted:
            callback(block_hash)

    def _forget(self, slot: int) -> None:
        content = self._content.pop(slot)
        del self._by_hash[content.block_hash]
        self._changed(content, KvEventKind.EVICTED)
        for callback in self._on_change:
            callback(content.block_hash)

    def _changed(self, content: BlockToStore, kind: KvEventKind) -> None:
        if not content.is_announced:
            return
        if kind is KvEventKind.STORED:
            self._announced[content.block_hash] = None
        else:
            del self._announced[content.block_hash]
        if self._changes.pop(content.block_hash, kind) is kind:
            self._changes[content.block_hash] = kind
