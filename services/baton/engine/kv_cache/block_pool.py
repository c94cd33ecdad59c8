"""The block pool: reference counts, content hashes and states of KV blocks. The executor owns the memory
itself.

Each block is in exactly one state:

- `receiving` or `quarantined` while a read from another worker's memory may write to it;
- otherwise `used` while a sequence refers to it or a transfer pins it;
- otherwise `cached` if its content is known by hash;
- otherwise `free`.

Content that was pulled from another worker's cache is a replica until a second request has used it here,
unless its session goes on here. Idle replicas are evicted before other cached content
(`engine.kv_cache.eviction`).
"""

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import islice

from baton.core.cluster.worker_report import BlockCounts
from baton.core.interfaces import GenerationTable
from baton.core.kv.block_hash import NO_HASH, BlockHash, table_hash
from baton.core.kv.kv_tables import TableWindows
from baton.engine.kv_cache.block_fills import BlockFill, BlockFills
from baton.engine.kv_cache.eviction import EvictionQueue
from baton.engine.kv_cache.pool_contents import PoolContents
from baton.engine.kv_cache.step_fence import StepFence
from baton.engine.retention.content_owner import ContentOwner
from baton.engine.retention.eviction_order import EvictionOrder
from baton.engine.state.require import require


class BlockPool(PoolContents):
    """The blocks of one worker. Implements `core.interfaces.PinPool` and `ReceivingPool`.

    The engine holds references. Transfers pin, receive and quarantine blocks. Wrong use, such as a reference
    to a free block, raises ValueError and leaves that block unchanged.

    fence: the idle blocks that steps in flight may access. `Engine` records there when steps begin and end.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        generation_table: GenerationTable,
        windows: TableWindows | None = None,
        *,
        announce_every: int = 1,
    ) -> None:
        """`windows`: of the block tables that share the pool; None: one table without a window.

        announce_every: of how many successive blocks of a chain one is announced to schedulers
        """
        super().__init__(num_blocks, block_size_tokens, generation_table, windows, announce_every=announce_every)
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._fills = BlockFills(num_blocks)
        self._eviction_queue = EvictionQueue(num_blocks)
        self.fence = StepFence()
        self._held_for_others = 0
        self._on_freed: list[Callable[[], None]] = []

    # -- counts --------------------------------------------------------------------------------------------------------

    @property
    def num_allocatable(self) -> int:
        """Blocks that can be allocated when no step is in flight: free ones and idle cached ones, except
        those that are being copied out."""
        return len(self._eviction_queue) - self.num_idle(self._copies.copying)

    def num_allocatable_without(self, block_ids: Iterable[int]) -> int:
        """Return `num_allocatable` without these blocks."""
        return len(self._eviction_queue) - self.num_idle({*self._copies.copying, *block_ids})

    @property
    def num_replicas(self) -> int:
        """Number of replicas, including those that are being received."""
        return self._eviction_queue.num_replicas

    @property
    def num_idle_replicas(self) -> int:
        """Number of replicas that are not in use. `evict_replicas` can free as many."""
        return self._eviction_queue.num_idle_replicas

    @property
    def held_for_others(self) -> int:
        """Blocks that are pinned by a transfer and used by no sequence."""
        return self._held_for_others

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state."""
        return BlockCounts(
            total=self.num_blocks,
            free=self._eviction_queue.num_free,
            cached=self._eviction_queue.num_cached,
            used=self.num_blocks - len(self._eviction_queue) - self._fills.num_receiving - self._fills.num_quarantined,
            receiving=self._fills.num_receiving,
            quarantined=self._fills.num_quarantined,
            held_for_others=self._held_for_others,
        )

    def num_refs(self, block_id: int) -> int:
        """Return the number of references to a block."""
        return self._refs[block_id]

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks are not in use."""
        return sum(self._is_idle(b) for b in block_ids)

    def is_readable(self, block_id: int) -> bool:
        """Return True if no read from another worker is to fill the block or may still write to it."""
        return self._fills.is_readable(block_id)

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a sequence or a transfer may have made blocks allocatable."""
        self._on_freed.append(callback)

    def copy_changed(self, block_id: int) -> None:
        """Record that another tier has a copy of a block's content now, or has none any more."""
        self._eviction_queue.copy_changed(block_id)

    def order_by(self, order: EvictionOrder) -> None:
        """Evict cached blocks in this order instead of least recently used first.

        Raises ValueError if blocks are cached.
        """
        self._eviction_queue.order_by(order)

    # -- allocation and references -------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int, entries: Sequence[int] = ()) -> list[int] | None:
        """Allocate blocks to compute into. Each gets a new generation and one reference.

        entries: of a flat block table (`core.kv.kv_tables`) for which the blocks are; empty: all for table 0.
        Blocks that a step in flight may still read or write, or that are being copied out, are not allocated.
        Returns None, and changes nothing, if fewer than `num_blocks` are available.
        """
        fenced: Set[int] = self.fence.blocks
        if self._copies.copying:
            fenced = fenced | self._copies.copying.keys()
        chosen = self._eviction_queue.first(num_blocks, fenced)
        if len(chosen) < num_blocks:
            return None
        for block_id in chosen:
            self._eviction_queue.take(block_id)
            if self._contents.has_content(block_id):
                self._evict_content(block_id)
            self._generation_table.begin_generation(block_id)
            self._refs[block_id] = 1
        if (num_tables := self.windows.num_tables) > 1:
            for block_id, entry in zip(chosen, entries or (0,) * num_blocks, strict=True):
                self._contents.set_table(block_id, entry % num_tables)
        return chosen

    def allocate_receiving(self, num_blocks: int, entries: Sequence[int] = ()) -> list[int] | None:
        """Allocate blocks to receive KV into. Otherwise as `allocate`."""
        chosen = self.allocate(num_blocks, entries)
        for block_id in chosen or ():
            self._fills.receive(block_id)
        return chosen

    def ref(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block. Raises ValueError for a free block."""
        for block_id in block_ids:
            self._take(block_id)
            self._count(block_id, refs=1)

    def unref(
        self, block_ids: Sequence[int], owner: ContentOwner | None = None, positions: Sequence[int] | None = None
    ) -> None:
        """Remove a reference from each block. Raises ValueError for a block without references.

        Pass the blocks in the order of the sequence. They are released in reverse order, so that a chain is
        evicted from its tail.

        owner: who has used their content; None if that is known already, or unknown
        positions: of the blocks in their tables; None: they are the first blocks of all tables
        """
        num_tables = self.windows.num_tables
        for index in range(len(block_ids) - 1, -1, -1):
            block_id = block_ids[index]
            if not self._refs[block_id]:
                raise ValueError(f"block {block_id} has no reference; it cannot be unreferenced")
            if owner is not None and self._contents.has_content(block_id):
                self._set_use(block_id, owner, index // num_tables if positions is None else positions[index])
            self._count(block_id, refs=-1)
            self._release(block_id)
        self._notify_freed()

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep these blocks for a transfer, even after their sequence has ended.

        Raises ValueError for a block that is free or not readable.
        """
        for block_id in block_ids:
            if not self.is_readable(block_id):
                raise ValueError(f"block {block_id} is {self._fills.of(block_id).value}; it cannot be pinned")
            self._take(block_id)
            self._count(block_id, pins=1)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Remove a pin from each block. Raises ValueError for a block without pins."""
        for block_id in reversed(block_ids):
            if not self._pins[block_id]:
                raise ValueError(f"block {block_id} has no pin; it cannot be unpinned")
            self._count(block_id, pins=-1)
            self._release(block_id)
        self._notify_freed()

    # -- content -------------------------------------------------------------------------------------------------------

    def match(self, hashes: Iterable[BlockHash], max_blocks: int) -> list[int]:
        """Return at most `max_blocks` leading blocks of `hashes`, with a reference added to each."""
        found = self.lookup(islice(hashes, max_blocks))
        self.ref(found)
        return found

    def set_hash(self, block_id: int, block_hash: BlockHash) -> None:
        """Publish the hash of a full block whose content is final, so that other sequences can share it.

        block_hash: of its tokens, see `table_hash`.
        Raises ValueError if the block has a hash already, is not in use, or is not readable.
        """
        is_in_use = self.is_readable(block_id) and (self._refs[block_id] or self._pins[block_id])
        if self._contents.has_content(block_id) or block_hash == NO_HASH or not is_in_use:
            raise ValueError(f"hash {block_hash.hex()} cannot be set: block {block_id} has a hash or is not in use")
        self._publish(block_id, table_hash(block_hash, self._contents.table_of(block_id)), is_computed=True)

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Withdraw blocks whose content may be wrong. No other sequence may use them.

        They can no longer be found by hash. Their generation ends, so a remote read of them fails validation.
        """
        for block_id in block_ids:
            if self._contents.has_content(block_id):
                self._copies.withdrawn(self._contents.hash_of(block_id))
                self._forget_content(block_id)
            self._generation_table.begin_generation(block_id)

    def forget_tenant(self, tenant_root: BlockHash) -> int:
        """Withdraw all content of a tenant, or of one that is not known, as `unpublish` does.

        Returns how many blocks had any.
        """
        blocks = self._contents.blocks_of_tenant(tenant_root)
        for block_id in blocks:
            is_idle = self._is_idle(block_id)
            if is_idle:
                self._eviction_queue.take(block_id)
            self.unpublish((block_id,))
            if is_idle:
                self._eviction_queue.put(block_id, None)
        return len(blocks)

    # -- replicas ------------------------------------------------------------------------------------------------------

    def mark_replicas(self, block_ids: Sequence[int]) -> None:
        """Mark receiving blocks as replicas until a second request uses them or they are evicted.

        Raises ValueError for a block that is not receiving.
        """
        for block_id in block_ids:
            if self._fills.of(block_id) is not BlockFill.RECEIVING:
                raise ValueError(f"block {block_id} is not receiving; it cannot become a replica")
            self._eviction_queue.mark_replica(block_id)

    def count_use(self, block_ids: Iterable[int]) -> None:
        """Count a request that has found these blocks in the cache.

        The first use of a replica is by the request for which it was pulled. With the second use it is no
        longer a replica, and is cached like any other block.
        """
        for block_id in block_ids:
            if self._eviction_queue.is_replica(block_id):
                self._eviction_queue.count_use(block_id, self.use_of(block_id))
            if not self._eviction_queue.is_replica(block_id):
                self._copies.mark_reused(block_id)

    def is_replica(self, block_id: int) -> bool:
        """Return True if the block is a replica: the worker that it was pulled from probably has it, too."""
        return self._eviction_queue.is_replica(block_id)

    def evict_replicas(self, max_blocks: int) -> int:
        """Evict at most `max_blocks` idle replicas, least recently used first. Returns how many."""
        evicted = self._eviction_queue.oldest_replicas(max_blocks)
        for block_id in evicted:
            self._eviction_queue.take(block_id)
            self._evict_content(block_id)
            self._eviction_queue.put(block_id, None)
        return len(evicted)

    # -- copies to a slower tier ---------------------------------------------------------------------------------------

    def begin_copy(self, block_id: int) -> BlockHash:
        """Keep an idle block from being reallocated until `end_copy`, and return its hash.

        Several copies may read it. It stays cached, and keeps its place in the order of eviction. Returns
        NO_HASH, and changes nothing, if the block is in use or has no content.
        """
        if not self._is_idle(block_id):
            return NO_HASH
        block_hash = self._contents.hash_of(block_id)
        if block_hash != NO_HASH:
            self._copies.begin_copy(block_id)
        return block_hash

    def end_copy(self, block_ids: Sequence[int]) -> None:
        """Record that one copy of each of these blocks has ended. Raises KeyError for a block that is not
        copied."""
        self._copies.end_copy(block_ids)
        for block_id in block_ids:
            self._eviction_queue.copy_changed(block_id)
        self._notify_freed()

    # -- receiving (ReceivingPool) -------------------------------------------------------------------------------------

    def mark_received(self, block_id: int, block_hash: BlockHash) -> None:
        """Record that a receiving block was filled and its read was validated.

        block_hash: published for the block; NO_HASH for a partial last block, which is not shared.
        If its sequence has ended, the block is cached, or free without a hash.
        """
        self._fills.received(block_id)
        if block_hash != NO_HASH:
            self._publish(block_id, block_hash, is_computed=False)
        else:
            self._eviction_queue.unmark_replica(block_id)  # another request will not find it
        self._release(block_id)
        self._notify_freed()

    def drop_receiving(self, block_ids: Sequence[int]) -> None:
        """End the reception of blocks that will not be filled, and to which no read can write.

        A block to which a sequence still refers stays in use.
        """
        for block_id in reversed(block_ids):
            self._fills.drop(block_id)
            self._eviction_queue.unmark_replica(block_id)
            self._release(block_id)
        self._notify_freed()

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Take blocks out of use until `end_quarantine`, because a read may still write to them."""
        for block_id in block_ids:
            self._fills.quarantine(block_id)

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        """Return quarantined blocks to use. Raises ValueError for a block that is not quarantined."""
        for block_id in reversed(block_ids):
            self._fills.end_quarantine(block_id)
            self._eviction_queue.unmark_replica(block_id)
            self._release(block_id)
        self._notify_freed()

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check all invariants. Reads the whole pool: for tests and audits only.

        Raises AssertionError naming the first invariant that does not hold.
        """
        idle = {b for b in range(self.num_blocks) if self._is_idle(b)}
        require(self.counts().is_balanced, f"counts do not add up: {self.counts()}")
        incoming = {b for b in range(self.num_blocks) if self._fills.may_be_written(b)}
        contents = {b for b in range(self.num_blocks) if self._contents.has_content(b)}
        self._eviction_queue.check(idle=idle, contents=contents, incoming=incoming)
        self._copies.check(contents)
        self.fence.check(idle)
        self._contents.check(idle)
        require(
            self._held_for_others == sum(self._is_held(b) for b in range(self.num_blocks)), "held_for_others is wrong"
        )
        self._fills.check()
        for b in range(self.num_blocks):
            require(self._refs[b] >= 0 and self._pins[b] >= 0, f"block {b} has negative counts")
            require(
                self.is_readable(b) or (not self._contents.has_content(b) and not self._pins[b]),
                f"block {b} is published or pinned before it was received",
            )
            require(
                self._fills.of(b) is not BlockFill.VOID or self._refs[b] > 0, f"block {b} is void and has no reference"
            )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_idle(self, block_id: int) -> bool:
        return not self._refs[block_id] and not self._pins[block_id] and self._fills.is_readable(block_id)

    def _is_held(self, block_id: int) -> bool:
        return self._pins[block_id] > 0 and not self._refs[block_id]

    def _take(self, block_id: int) -> None:
        """Take a cached block out of the eviction queue. Raises ValueError if the block is free."""
        if self._is_idle(block_id):
            if self._eviction_queue.is_free(block_id):
                raise ValueError(f"block {block_id} is free; it has no content to share")
            self._eviction_queue.take(block_id)
            self.fence.remove(block_id)  # it has a hash, so no step writes it

    def _release(self, block_id: int) -> None:
        """Put the block into the eviction queue if no reference, pin or read is left."""
        if self._refs[block_id] or self._pins[block_id] or self._fills.may_be_written(block_id):
            return
        self._fills.reset(block_id)
        if self._contents.is_duplicated(block_id):
            self._forget_content(block_id)  # another block in use has the same content
        has_content = self._contents.has_content(block_id)
        self._eviction_queue.put(block_id, self.use_of(block_id) if has_content else None)
        self.fence.add(block_id)
        if has_content:
            self._copies.became_idle(block_id)

    def _evict_content(self, block_id: int) -> None:
        block_hash = self._contents.hash_of(block_id)
        self._forget_content(block_id)
        self._notify_evicted(block_hash)

    def _forget_content(self, block_id: int) -> None:
        """Remove the block's hash. The content is evicted if no other block has it."""
        self._eviction_queue.unmark_replica(block_id)
        self._remove_content(block_id)

    def _count(self, block_id: int, *, refs: int = 0, pins: int = 0) -> None:
        was_held = self._is_held(block_id)
        self._refs[block_id] += refs
        self._pins[block_id] += pins
        self._held_for_others += self._is_held(block_id) - was_held

    def _notify_freed(self) -> None:
        for callback in self._on_freed:
            callback()
