"""The set of workers that claim each block, in one tier, as bit masks.

Lookups of prompts are far more frequent than changes. Their cost is cache misses: every lookup by hash reads
another place in memory. Blocks that were claimed together are therefore stored in one `Extent`, in the order
of the event, which is mostly the order of their chain. After the first block of a prompt, the following ones
are compared with the extent and need no lookup of their own. If the order is not that of a chain, lookups are
slower but still correct.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from baton.core.kv.block_hash import BlockHash

MAX_EXTENT_BLOCKS = 64
"""Most blocks in an extent. The cost of changing one block of an extent is proportional to its size."""

SHARDS = 16
"""Number of hash tables that blocks are distributed over, by the first byte of their hash. One large table
would block the event loop for tens of milliseconds whenever it is resized."""


class Extent:
    """Blocks that are claimed by the same workers, which are the bits of `mask`."""

    __slots__ = ("hashes", "mask")

    def __init__(self, hashes: tuple[BlockHash, ...], mask: int) -> None:
        self.hashes = hashes
        self.mask = mask

    def num_common(self, chain: Sequence[BlockHash], at: int) -> int:
        """Return how many blocks of `chain` from position `at` on follow each other in this extent.

        The block at position `at` must be in the extent.
        """
        hashes = self.hashes
        if len(hashes) == 1:  # typical for blocks that decode steps have filled
            return 1
        if hashes[0] != chain[at]:
            hashes = hashes[hashes.index(chain[at]) :]
        asked = chain[at : at + len(hashes)]
        if asked == hashes:
            return len(hashes)
        return next((i for i, (a, b) in enumerate(zip(asked, hashes, strict=False)) if a != b), len(asked))


class Claims:
    """Maps each block to the mask of the workers that claim it. Each worker incarnation has one bit."""

    def __init__(self) -> None:
        self._tables: list[dict[BlockHash, Extent]] = [{} for _ in range(SHARDS)]
        self._table_of = [self._tables[first % SHARDS] for first in range(256)]  # by first byte

    def __len__(self) -> int:
        """Return the number of blocks with at least one claim."""
        return sum(map(len, self._tables))

    def toggle(self, hashes: Iterable[BlockHash], bit: int) -> None:
        """Toggle the claims of one worker: add those that it does not have, remove the others.

        No hash may repeat.
        """
        table_of = self._table_of
        touched: dict[Extent | None, list[BlockHash]] = {}
        for block_hash in hashes:
            touched.setdefault(table_of[block_hash[0]].get(block_hash), []).append(block_hash)
        for extent, toggled in touched.items():
            if extent is None:
                for first in range(0, len(toggled), MAX_EXTENT_BLOCKS):
                    self._put(Extent(tuple(toggled[first : first + MAX_EXTENT_BLOCKS]), bit))
            elif len(toggled) == len(extent.hashes):
                extent.mask ^= bit
                if not extent.mask:
                    self._remove(extent.hashes)
            else:
                self._split(extent, set(toggled), bit)

    def mask_of(self, block_hash: BlockHash) -> int:
        """Return the mask of the workers that claim a block."""
        extent = self._table_of[block_hash[0]].get(block_hash)
        return extent.mask if extent is not None else 0

    def spans(self, chain: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """Yield (end, mask) of consecutive spans of `chain`: `mask` claims all blocks from the last end to
        `end`.

        Stops at the first block without claims.
        """
        table_of, at = self._table_of, 0
        while at < len(chain):
            extent = table_of[chain[at][0]].get(chain[at])
            if extent is None:
                return
            at += extent.num_common(chain, at)
            yield at, extent.mask

    def _split(self, extent: Extent, toggled: Collection[BlockHash], bit: int) -> None:
        """Move the toggled blocks of an extent into a new one. Both keep their order."""
        moved = tuple(block_hash for block_hash in extent.hashes if block_hash in toggled)
        extent.hashes = tuple(block_hash for block_hash in extent.hashes if block_hash not in toggled)
        if extent.mask == bit:
            self._remove(moved)
        else:
            self._put(Extent(moved, extent.mask ^ bit))

    def _put(self, extent: Extent) -> None:
        table_of = self._table_of
        for block_hash in extent.hashes:
            table_of[block_hash[0]][block_hash] = extent

    def _remove(self, hashes: Iterable[BlockHash]) -> None:
        table_of = self._table_of
        for block_hash in hashes:
            del table_of[block_hash[0]][block_hash]
