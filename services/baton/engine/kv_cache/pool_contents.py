"""`PoolContents`: what the blocks of one pool contain, whatever uses the blocks."""

from collections.abc import Callable, Iterable, Sequence

from baton.core.interfaces import GenerationTable
from baton.core.kv.block_hash import NO_HASH, BlockHash, table_hash
from baton.core.kv.kv_events import KvEventKind
from baton.core.kv.kv_tables import TableWindows
from baton.engine.kv_cache.content_index import CachedPrefix, ContentIndex
from baton.engine.kv_cache.pool_listeners import CopySources, PoolListener
from baton.engine.retention.content_owner import ContentOwner, ContentUse


class PoolContents:
    """The content of blocks: by hash, whose it is, how it was used last, and who follows its changes.

    The base of `BlockPool`, which knows how blocks are used. Nothing here depends on that.
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
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.announce_every = announce_every
        self.windows = windows or TableWindows((0,), block_size_tokens)
        self._generation_table = generation_table
        self._contents = ContentIndex(num_blocks, announce_every)
        self._copies = CopySources()
        self._owners: list[ContentOwner | None] = [None] * num_blocks
        self._positions = [0] * num_blocks
        self._on_stored: list[Callable[[BlockHash, bool], None]] = []
        self._on_evicted: list[Callable[[BlockHash], None]] = []
        self._on_forgotten: list[Callable[[BlockHash], None]] = []

    def on_stored(self, callback: Callable[[BlockHash, bool], None]) -> None:
        """Call `callback` with the hash of content that no block had, and with True if it was computed."""
        self._on_stored.append(callback)

    def on_evicted(self, callback: Callable[[BlockHash], None]) -> None:
        """Call `callback` with the hash of content that the pool had no room for. What is withdrawn is not
        evicted."""
        self._on_evicted.append(callback)

    def on_forgotten(self, callback: Callable[[BlockHash], None]) -> None:
        """Call `callback` with the hash of content that no block has any more."""
        self._on_forgotten.append(callback)

    def add_listener(self, listener: PoolListener) -> None:
        """Tell `listener` about blocks that become idle and about content that is withdrawn."""
        self._copies.add_listener(listener)

    def generation(self, block_id: int) -> int:
        """Return the current generation of a block's content."""
        return self._generation_table.generation(block_id)

    # -- content by hash -----------------------------------------------------------------------------------------------

    def find(self, block_hash: BlockHash) -> int | None:
        """Return a block that holds this content; None if there is none. Adds no reference."""
        return self._contents.find(block_hash)

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest known prefix of hashes of entries. Adds no reference."""
        return self._contents.lookup(hashes)

    def lookup_prefix(self, hashes: Sequence[BlockHash]) -> CachedPrefix:
        """Return the longest prefix of which each table has what a continuation sees. Adds no reference."""
        return self._contents.lookup_prefix(hashes, self.windows)

    def count_cached(self, hashes: Iterable[BlockHash]) -> int:
        """Return how many leading blocks are in the pool now. Adds no reference, so they may be evicted."""
        return len(self.lookup(hashes))

    def hash_of(self, block_id: int) -> BlockHash:
        """Return the published hash of a block; NO_HASH if it has none."""
        return self._contents.hash_of(block_id)

    def hashes(self) -> list[BlockHash]:
        """Return the hashes of all content in the pool that belongs to table 0."""
        return self._contents.hashes()

    def withdraw_copies(self, hashes: Iterable[BlockHash]) -> None:
        """Withdraw content that may be wrong, and that the pool has evicted, from slower tiers."""
        for block_hash in hashes:
            if self._contents.find(block_hash) is None:
                self._copies.withdrawn(block_hash)

    # -- announcements -------------------------------------------------------------------------------------------------

    def announced_hashes(self) -> list[BlockHash]:
        """Return the hashes of all announced content, for a snapshot."""
        return self._contents.announced_hashes()

    def announce(
        self, chain: Sequence[BlockHash], begin: int, end: int, *, is_end: bool, tenant_root: BlockHash = NO_HASH
    ) -> None:
        """Announce cached blocks of a chain to schedulers, see `ContentIndex.announce`.

        tenant_root: of the tenant whose blocks they are; NO_HASH if it is not known here
        """
        if tenant_root != NO_HASH:
            for table in range(self.windows.num_tables):
                self._contents.set_tenant((table_hash(each, table) for each in chain[begin:end]), tenant_root)
        self._contents.announce(chain, begin, end, is_end=is_end)

    def on_announced(self, callback: Callable[[BlockHash], None]) -> None:
        """Call `callback` with the hash of content that is announced to schedulers now."""
        self._contents.on_announced(callback)

    def is_announced(self, block_hash: BlockHash) -> bool:
        """Return True if the content is known and was announced to schedulers."""
        return self._contents.is_announced(block_hash)

    @property
    def num_evicted(self) -> int:
        """Number of evictions of content of table 0."""
        return self._contents.num_evicted

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        """Return the net changes since the last call: announced content that was STORED or EVICTED."""
        return self._contents.take_events()

    # -- whose it is, and how it was used ------------------------------------------------------------------------------

    def tenant_of(self, block_hash: BlockHash) -> BlockHash:
        """Return the root hash of the tenant whose content it is; NO_HASH if it is not known."""
        return self._contents.tenant_of(block_hash)

    def is_reused(self, block_id: int) -> bool:
        """Return True if a second request has found the block's content here."""
        return self._copies.is_reused(block_id)

    def use_of(self, block_id: int) -> ContentUse:
        """Return the last use of a block's content."""
        return ContentUse(self._owners[block_id], self._positions[block_id], self._copies.is_reused(block_id))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _publish(self, block_id: int, block_hash: BlockHash, *, is_computed: bool) -> None:
        self._generation_table.set_hash(block_id, block_hash)
        is_new = bool(self._on_stored) and self._contents.find(block_hash) is None
        self._contents.add(block_id, block_hash)
        if is_new:
            for callback in self._on_stored:
                callback(block_hash, is_computed)

    def _notify_evicted(self, block_hash: BlockHash) -> None:
        if self._on_evicted and self._contents.find(block_hash) is None:
            for callback in self._on_evicted:
                callback(block_hash)

    def _set_use(self, block_id: int, owner: ContentOwner, position: int) -> None:
        self._owners[block_id] = owner.owner_with(self._owners[block_id], position)
        self._positions[block_id] = position

    def _remove_content(self, block_id: int) -> None:
        """Remove the block's hash. The content is evicted if no other block has it."""
        self._copies.forget_content(block_id)
        self._owners[block_id] = None
        block_hash = self._contents.hash_of(block_id)
        self._contents.remove(block_id)
        if self._on_forgotten and self._contents.find(block_hash) is None:
            for callback in self._on_forgotten:
                callback(block_hash)
