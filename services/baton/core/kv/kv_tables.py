"""Block tables: the layers whose KV of the same tokens lies in one block, and which blocks a window reaches.

Layers with different sliding windows have different tables, so that blocks outside a window can be freed
while other layers still see these tokens. All blocks have one size. A block table of a sequence is flat: with
T tables, the block of tokens `i * block_size_tokens` and following in table t is entry `i * T + t`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.core.kv.block_hash import BlockHash, first_visible_block, num_blocks_for, table_hash

NO_BLOCK = -1
"""Entry of a block table without a block: no layer of the table sees its tokens any more, or they are not
scheduled yet."""
MAX_TABLES = 16
"""Most tables of a layout whose windows are not more numerous."""
_CONTEXT_WINDOWS = 8
"""Length of the contexts for which blocks are sized, in windows: tables without a window hold so many times
the blocks of others."""
_TABLE_COST = 1 / 64
"""Cost of a further table, as a share of the memory: a block table to keep, allocate and read each step. Not
measured; it decides between layouts whose memory is nearly equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTable:
    """Layers that share a block table, in the order of their KV in a block.

    window: number of tokens that a token sees in them, itself included; 0 for all.
    num_bytes: of their KV in a block.
    """

    layers: tuple[int, ...]
    window: int
    num_bytes: int


def divide_layers(layers: Mapping[int, tuple[int, int]]) -> tuple[KvTable, ...]:
    """Divide layers into tables of similar size; `layers`: layer -> (bytes in a block, window).

    The layers of one window are divided evenly into as many tables as the block size demands. Of all block
    sizes the one is taken with which a context of 8 windows needs the least memory, see `_TABLE_COST`. Tables
    without a window come first, then the others, the longest window first.
    """
    of_window: dict[int, list[int]] = {}
    for layer, (_, window) in layers.items():
        of_window.setdefault(window, []).append(layer)
    classes = [of_window[window] for window in sorted(of_window, key=lambda window: (window > 0, -window))]
    if len(classes) == 1:
        return (_table(classes[0], layers),)
    sizes = {
        max(sum(layers[layer][0] for layer in part) for part in _parts(same, count))
        for same in classes
        for count in range(1, min(MAX_TABLES, len(same)) + 1)
    }
    divisions = [(size, division) for size in sorted(sizes) if (division := _divided(classes, layers, size))]
    return min(divisions, key=lambda each: _cost(*each))[1] if divisions else ()


def _divided(
    classes: Sequence[Sequence[int]], layers: Mapping[int, tuple[int, int]], size: int
) -> tuple[KvTable, ...] | None:
    """Return the fewest tables of at most `size` bytes, or None if a layer is larger or they are too many."""
    tables: list[KvTable] = []
    for same in classes:
        for count in range(1, min(MAX_TABLES, len(same)) + 1):
            parts = [_table(part, layers) for part in _parts(same, count)]
            if all(part.num_bytes <= size for part in parts):
                tables += parts
                break
        else:
            return None
    return tuple(tables) if len(tables) <= max(MAX_TABLES, len(classes)) else None


def _cost(size: int, tables: Sequence[KvTable]) -> float:
    rows = sum(1 if table.window else _CONTEXT_WINDOWS for table in tables)
    return size * rows * (1 + _TABLE_COST * len(tables))


def _parts(layers: Sequence[int], count: int) -> list[Sequence[int]]:
    """Divide layers into `count` parts whose lengths differ by at most one."""
    ends = [len(layers) * part // count for part in range(count + 1)]
    return [layers[begin:end] for begin, end in pairwise(ends)]


def _table(part: Sequence[int], layers: Mapping[int, tuple[int, int]]) -> KvTable:
    return KvTable(layers=tuple(part), window=layers[part[0]][1], num_bytes=sum(layers[each][0] for each in part))


@dataclass(frozen=True, slots=True)
class TableWindows:
    """The windows of the block tables, from which follows which blocks a sequence needs.

    windows: number of tokens that a token sees in each table, itself included; 0 for all.
    """

    windows: tuple[int, ...]
    block_size_tokens: int

    @property
    def num_tables(self) -> int:
        """Number of block tables of a sequence."""
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        """True if a table has a window."""
        return any(self.windows)

    @property
    def tables_by_window(self) -> dict[int, list[int]]:
        """The tables of each window."""
        found: dict[int, list[int]] = {}
        for table, window in enumerate(self.windows):
            found.setdefault(window, []).append(table)
        return found

    def first_blocks(self, index: int) -> tuple[int, ...]:
        """Return for each table the first block that the token at KV index `index`, or a later one, sees."""
        return tuple(first_visible_block(index, window, self.block_size_tokens) for window in self.windows)

    def first_by_window(self, num_blocks: int) -> dict[int, int]:
        """Return for each window the first block that tokens after `num_blocks` blocks see."""
        size = self.block_size_tokens
        return {window: first_visible_block(num_blocks * size, window, size) for window in dict.fromkeys(self.windows)}

    def num_blocks_at_once(self, num_tokens: int, chunk_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens needs at once, over all tables.

        chunk_tokens: most tokens of it that a step computes.
        """
        num_blocks = num_blocks_for(num_tokens, self.block_size_tokens)
        return sum(min(num_blocks, self._most_in_view(window, chunk_tokens) or num_blocks) for window in self.windows)

    def longest_sequence_blocks(self, num_blocks: int, chunk_tokens: int, *, at_most: int) -> int:
        """Return the longest block table of a sequence that needs at most `num_blocks` blocks at once.

        at_most: longest block table of interest. Tables with a window limit no length, if they fit at all.
        """
        if not self.has_windows:
            return min(at_most, num_blocks // self.num_tables)
        length, left = 0, num_blocks
        most = sorted(min(at_most, self._most_in_view(window, chunk_tokens) or at_most) for window in self.windows)
        for num_capped, own_most in enumerate(most):
            num_tables = self.num_tables - num_capped
            step = min(own_most - length, left // num_tables)
            length, left = length + step, left - step * num_tables
            if length < own_most:
                return length
        return at_most

    def most_windowed_blocks(self, num_blocks: int, chunk_tokens: int) -> int:
        """Return how many of these blocks tables with a window have, for a sequence of `num_blocks` blocks a
        table."""
        return sum(min(num_blocks, self._most_in_view(window, chunk_tokens)) for window in self.windows)

    def _most_in_view(self, window: int, chunk_tokens: int) -> int:
        """Return the most blocks that a chunk sees in a table with this window, at any place; 0 without a
        window."""
        return 1 + num_blocks_for(window + chunk_tokens - 1, self.block_size_tokens) if window else 0

    def num_held_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold what tokens after `num_tokens` tokens see, over all tables."""
        return num_entries(self.first_blocks(num_tokens), num_blocks_for(num_tokens, self.block_size_tokens))


def num_entries(first_blocks: Sequence[int], num_blocks: int) -> int:
    """Return the length of `entries_from`."""
    return sum(max(0, num_blocks - first) for first in first_blocks)


def entries_from(first_blocks: Sequence[int], num_blocks: int, begin: int = 0) -> Sequence[int]:
    """Return the entries of a flat block table of `num_blocks` blocks that are not before `first_blocks`.

    begin: leave out the entries of the blocks before it.
    """
    num_tables = len(first_blocks)
    if num_tables == 1:
        return range(max(begin, first_blocks[0]), num_blocks)
    return [
        index * num_tables + table
        for index in range(max(begin, min(first_blocks)), num_blocks)
        for table, first in enumerate(first_blocks)
        if index >= first
    ]


def hashes_of_entries(hashes: Sequence[BlockHash], entries: Sequence[int], num_tables: int) -> list[BlockHash]:
    """Return the hashes of entries of a flat block table, as far as their blocks have hashes."""
    if num_tables == 1:
        return [hashes[entry] for entry in entries if entry < len(hashes)]
    end = len(hashes) * num_tables
    return [table_hash(hashes[entry // num_tables], entry % num_tables) for entry in entries if entry < end]


def hashes_of_prefix(hashes: Sequence[BlockHash], windows: TableWindows) -> list[BlockHash]:
    """Return the hashes of all blocks, over all tables, that are needed to continue after a prefix.

    hashes: of the prefix's blocks. The order is that of their entries in a flat block table.
    """
    first_blocks = windows.first_blocks(len(hashes) * windows.block_size_tokens)
    return hashes_of_entries(hashes, entries_from(first_blocks, len(hashes)), windows.num_tables)


def windows_text(tables: Sequence[KvTable]) -> str:
    """Describe tables for the summary of a device, such as `3 layers, 5 x 3 layers with window 512`."""
    counts = Counter((len(table.layers), table.window) for table in tables)
    return ", ".join(
        f"{f'{count} x ' if count > 1 else ''}{num_layers} layers" + (f" with window {window}" if window else "")
        for (num_layers, window), count in counts.items()
    )
