"""Who claims which blocks, in one tier: a mask of lives for each block, kept once for neighbours that the
same lives claim.

A prompt is asked for far more often than claims change, and what asking costs is memory: each block that is
looked up by its hash lies somewhere else. So blocks that were claimed together stand in one `Extent`, in the
order in which they were told of, which mostly is that of their chain: what follows the first block of a
prompt is then compared, not looked up. An order that is no chain's costs time, and is never wrong: an extent
says nothing but that the same lives claim each of its blocks.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from baton.core.kv.block_hash import BlockHash

MAX_EXTENT_BLOCKS = 64
"""A change to one block of an extent costs by their number."""

SHARDS = 16
"""Tables that blocks are spread over, by the first byte of their hash. One large table would stop everything
for tens of milliseconds whenever it grows, or is full of what has gone."""


class Extent:
    """Blocks that the same lives claim, which are the bits of `mask`."""

    __slots__ = ("hashes", "mask")

    def __init__(self, hashes: tuple[BlockHash, ...], mask: int) -> None:
        self.hashes = hashes
        self.mask = mask

    def num_common(self, chain: Sequence[BlockHash], at: int) -> int:
        """How many blocks of `chain`, from position `at` on, are here side by side; the first one is here."""
        hashes = self.hashes
        if len(hashes) == 1:  # as decode steps tell of blocks
            return 1
        if hashes[0] != chain[at]:
            hashes = hashes[hashes.index(chain[at]) :]
        asked = chain[at : at + len(hashes)]
        if asked == hashes:
            return len(hashes)
        return next((i for i, (a, b) in enumerate(zip(asked, hashes, strict=False)) if a != b), len(asked))


class Claims:
    """Single owner: a `PrefixIndex`. Lives are bits of a mask."""

    def __init__(self) -> None:
        self._tables: list[dict[BlockHash, Extent]] = [{} for _ in range(SHARDS)]
        self._table_of = [self._tables[first % SHARDS] for first in range(256)]  # by first byte

    def __len__(self) -> int:
        """Blocks that anybody claims."""
        return sum(map(len, self._tables))

    def flip(self, hashes: Iterable[BlockHash], bit: int) -> None:
        """One life claims these blocks, each once, or claims them no more: what it did not claim before it
        does now, and the reverse."""
        table_of = self._table_of
        touched: dict[Extent | None, list[BlockHash]] = {}
        for block_hash in hashes:
            touched.setdefault(table_of[block_hash[0]].get(block_hash), []).append(block_hash)
        for extent, flipped in touched.items():
            if extent is None:
                for first in range(0, len(flipped), MAX_EXTENT_BLOCKS):
                    self._put(Extent(tuple(flipped[first : first + MAX_EXTENT_BLOCKS]), bit))
            elif len(flipped) == len(extent.hashes):
                extent.mask ^= bit
                if not extent.mask:
                    self._remove(extent.hashes)
            else:
                self._split(extent, set(flipped), bit)

    def mask_of(self, block_hash: BlockHash) -> int:
        """Who claims that block."""
        extent = self._table_of[block_hash[0]].get(block_hash)
        return extent.mask if extent is not None else 0

    def spans(self, chain: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """(a position, mask of who claims every block from the position before, at first 0, up to it), up to
        the first block that nobody claims."""
        table_of, at = self._table_of, 0
        while at < len(chain):
            extent = table_of[chain[at][0]].get(chain[at])
            if extent is None:
                return
            at += extent.num_common(chain, at)
            yield at, extent.mask

    def _split(self, extent: Extent, flipped: Collection[BlockHash], bit: int) -> None:
        """Some of its blocks leave, and are another extent; both keep their order."""
        leaving = tuple(block_hash for block_hash in extent.hashes if block_hash in flipped)
        extent.hashes = tuple(block_hash for block_hash in extent.hashes if block_hash not in flipped)
        if extent.mask == bit:
            self._remove(leaving)
        else:
            self._put(Extent(leaving, extent.mask ^ bit))

    def _put(self, extent: Extent) -> None:
        table_of = self._table_of
        for block_hash in extent.hashes:
            table_of[block_hash[0]][block_hash] = extent

    def _remove(self, hashes: Iterable[BlockHash]) -> None:
        table_of = self._table_of
        for block_hash in hashes:
            del table_of[block_hash[0]][block_hash]
