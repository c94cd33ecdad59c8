"""The content of blocks by hash, and the changes to publish."""

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import takewhile
from typing import NamedTuple

from baton.core.kv.block_hash import NO_HASH, BlockHash, table_hash
from baton.core.kv.kv_events import KvEventKind
from baton.core.kv.kv_tables import TableWindows, entries_from, hashes_of_entries
from baton.engine.state.require import require


class CachedPrefix(NamedTuple):
    """The part of a prompt that is in the cache.

    num_blocks: leading blocks of each table that need not be computed.
    first_blocks: for each table, the first of them that is seen when the prompt is continued. Those before
        may be in the cache or not.
    block_ids: the others, in the order of `entries_from`.
    """

    num_blocks: int
    first_blocks: tuple[int, ...]
    block_ids: list[int]


def longest_prefix(hashes: Sequence[BlockHash], windows: TableWindows, is_known: Callable[[BlockHash], bool]) -> int:
    """Return the length of the longest prefix of `hashes` of which all blocks are known that a continuation
    sees, over all block tables.

    is_known: called with the hashes of table entries.
    """
    num_blocks = len(hashes)
    for table, window in enumerate(windows.windows):
        if not window:
            num_blocks = sum(1 for _ in takewhile(is_known, (table_hash(each, table) for each in hashes[:num_blocks])))
    of_window = {window: tables for window, tables in windows.tables_by_window.items() if window}
    # Windows above 1 reach into the last block: long prompts that are in no cache must not take long.
    seen = [table for window, tables in of_window.items() if window > 1 for table in tables]
    while num_blocks and not all(is_known(table_hash(hashes[num_blocks - 1], each)) for each in seen):
        num_blocks -= 1
    first_of, index = windows.first_by_window(num_blocks), num_blocks
    while of_window and index > min(first_of[window] for window in of_window):
        index -= 1
        if any(
            index >= first_of[window] and not is_known(table_hash(hashes[index], table))
            for window, tables in of_window.items()
            for table in tables
        ):
            num_blocks = index
            first_of = windows.first_by_window(num_blocks)
    return num_blocks


class ContentIndex:
    """The published hash of each block, and the blocks of each hash.

    Several blocks in use may have the same content. One of them is found by its hash. Events and snapshots
    name announced content only: of block table 0, whose hashes are those of the tokens, every
    `announce_every`-th block of a chain and its last full one. With 1 all content of the table is announced.

    num_evicted: evictions of content of table 0, announced or not.
    """

    def __init__(self, num_blocks: int, announce_every: int) -> None:
        self.num_evicted = 0
        self._announce_every = announce_every
        self._announced: dict[BlockHash, None] = {}
        self._table = [0] * num_blocks
        self._hash = [NO_HASH] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._tenants: dict[BlockHash, BlockHash] = {}
        self._same_content: dict[BlockHash, list[int]] = {}  # other blocks with the same content, all in use
        self._on_announced: list[Callable[[BlockHash], None]] = []
        self._changes: dict[BlockHash, KvEventKind] = {}  # net changes since last taken; at most twice the pool size

    def hash_of(self, block_id: int) -> BlockHash:
        """Return the published hash of a block; NO_HASH if it has none."""
        return self._hash[block_id]

    def table_of(self, block_id: int) -> int:
        """Return the block table whose KV the block holds."""
        return self._table[block_id]

    def set_table(self, block_id: int, table: int) -> None:
        """Set the table of a block without content."""
        self._table[block_id] = table

    def has_content(self, block_id: int) -> bool:
        """Return True if the block has a published hash."""
        return self._hash[block_id] != NO_HASH

    def is_duplicated(self, block_id: int) -> bool:
        """Return True if another block has the same content."""
        return self._hash[block_id] in self._same_content

    def find(self, block_hash: BlockHash) -> int | None:
        """Return a block that holds this content; None if there is none."""
        return self._by_hash.get(block_hash)

    def lookup(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks that hold the longest known prefix of `hashes`."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def lookup_prefix(self, hashes: Sequence[BlockHash], windows: TableWindows) -> CachedPrefix:
        """Return the longest prefix of `hashes` of which all blocks are known that a continuation sees."""
        if windows.windows == (0,):
            found = self.lookup(hashes)
            return CachedPrefix(len(found), (0,), found)
        num_blocks = longest_prefix(hashes, windows, self._by_hash.__contains__)
        first_blocks = windows.first_blocks(num_blocks * windows.block_size_tokens)
        wanted = hashes_of_entries(hashes, entries_from(first_blocks, num_blocks), windows.num_tables)
        return CachedPrefix(num_blocks, first_blocks, [self._by_hash[each] for each in wanted])

    def hashes(self) -> list[BlockHash]:
        """Return the hashes of all content of table 0."""
        return [block_hash for block_hash, block_id in self._by_hash.items() if not self._table[block_id]]

    def announced_hashes(self) -> list[BlockHash]:
        """Return the hashes of all announced content."""
        return list(self._announced)

    def is_announced(self, block_hash: BlockHash) -> bool:
        """Return True if the content is known and was announced."""
        return block_hash in self._announced

    def on_announced(self, callback: Callable[[BlockHash], None]) -> None:
        """Call `callback` with the hash of content that is announced now."""
        self._on_announced.append(callback)

    def announce(self, chain: Sequence[BlockHash], begin: int, end: int, *, is_end: bool) -> None:
        """Announce the content of a chain's blocks [begin, end), as far as it is known and was not announced.

        is_end: the chain does not go on now, so its last block is announced, too
        """
        if self._announce_every == 1:
            return  # announced when it was added
        end = min(end, len(chain))
        for index in range(self._next_announced(begin), end, self._announce_every):
            self._announce(chain[index])
        if is_end and end:
            self._announce(chain[end - 1])

    def set_tenant(self, hashes: Iterable[BlockHash], tenant_root: BlockHash) -> None:
        """Record whose content this is, as far as it is known."""
        self._tenants.update((each, tenant_root) for each in hashes if each in self._by_hash)

    def tenant_of(self, block_hash: BlockHash) -> BlockHash:
        """Return the root hash of the tenant whose content it is; NO_HASH if it is not known."""
        return self._tenants.get(block_hash, NO_HASH)

    def blocks_of_tenant(self, tenant_root: BlockHash) -> list[int]:
        """Return all blocks with content of a tenant, or of one that is not known."""
        found = [each for each in self._by_hash if self._tenants.get(each, tenant_root) == tenant_root]
        return [b for each in found for b in (self._by_hash[each], *self._same_content.get(each, ()))]

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        """Return the net changes since the last call: announced content that was STORED or EVICTED.

        Content that was stored and evicted again in between is not reported.
        """
        events = [(kind, block_hash) for block_hash, kind in self._changes.items()]
        self._changes.clear()
        return events

    def add(self, block_id: int, block_hash: BlockHash) -> None:
        """Publish the hash of a block that has none."""
        self._hash[block_id] = block_hash
        if block_hash in self._by_hash:
            self._same_content.setdefault(block_hash, []).append(block_id)
            return
        self._by_hash[block_hash] = block_id
        if self._announce_every == 1:
            self._announce(block_hash)

    def remove(self, block_id: int) -> None:
        """Remove the hash of a block that has one. The content is evicted if no other block has it."""
        block_hash, self._hash[block_id] = self._hash[block_id], NO_HASH
        others = [b for b in (self._by_hash[block_hash], *self._same_content.pop(block_hash, ())) if b != block_id]
        if others:
            self._by_hash[block_hash] = others[0]
            if others[1:]:
                self._same_content[block_hash] = others[1:]
        else:
            del self._by_hash[block_hash]
            self._tenants.pop(block_hash, None)
            self.num_evicted += not self._table[block_id]
            if block_hash in self._announced:
                del self._announced[block_hash]
                self._changed(block_hash, KvEventKind.EVICTED)

    def check(self, idle: Set[int]) -> None:
        """Check all invariants. `idle` are the blocks that are not in use. Raises AssertionError."""
        found = [*self._by_hash.items(), *((h, b) for h, more in self._same_content.items() for b in more)]
        require(all(self._hash[b] == h for h, b in found), "a hash leads to a block with another hash")
        require(
            len(found) == sum(h != NO_HASH for h in self._hash), "a block is not found by its hash, or is found twice"
        )
        require(
            not any(b in idle for more in self._same_content.values() for b in more),
            "an idle block has the same content as another",
        )
        require(self._announced.keys() <= self._by_hash.keys(), "announced content is not known")
        require(self._tenants.keys() <= self._by_hash.keys(), "content that is not known has a tenant")

    def _next_announced(self, index: int) -> int:
        """Return the first of the announced positions of a chain that is not before `index`."""
        return (index // self._announce_every + 1) * self._announce_every - 1

    def _announce(self, block_hash: BlockHash) -> None:
        block_id = self._by_hash.get(block_hash)
        if block_id is not None and not self._table[block_id] and block_hash not in self._announced:
            self._announced[block_hash] = None
            self._changed(block_hash, KvEventKind.STORED)
            for callback in self._on_announced:
                callback(block_hash)

    def _changed(self, block_hash: BlockHash, kind: KvEventKind) -> None:
        if self._changes.pop(block_hash, kind) is kind:
            self._changes[block_hash] = kind
