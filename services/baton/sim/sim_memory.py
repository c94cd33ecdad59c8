"""Simulated KV memory: each slot holds one number instead of a token's KV.

The number is a checksum of all tokens up to this one. So a wrong block is detected as a wrong number.
"""

from collections.abc import Iterable
from itertools import accumulate

from baton.core.kv.block_hash import token_ids
from baton.engine.kv_cache.checksum import START, extend, slots_of

EMPTY = 0
MAX_LOOP_TOKENS = 16
"""numpy is faster for more tokens."""


def contents(values: Iterable[int], prefix: int = START) -> list[int]:
    """Return the slot contents of token ids that follow a slot with content `prefix`."""
    tokens = token_ids(values)
    if len(tokens) > MAX_LOOP_TOKENS:
        slots: list[int] = slots_of(tokens, prefix).tolist()
        return slots
    return list(accumulate(tokens, extend, initial=prefix))[1:]


class SimMemory:
    """KV memory of `num_blocks` blocks with `block_size_tokens` slots each."""

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._blocks = [[EMPTY] * block_size_tokens for _ in range(num_blocks)]

    def block(self, block_id: int) -> tuple[int, ...]:
        """Return the slots of a block."""
        return tuple(self._blocks[block_id])

    def write_block(self, block_id: int, content: Iterable[int]) -> None:
        """Replace all slots of a block."""
        self._blocks[block_id][:] = content

    def slot(self, block_table: tuple[int, ...], index: int) -> int:
        """Return the content of token position `index` of a sequence."""
        return self._blocks[block_table[index // self.block_size_tokens]][index % self.block_size_tokens]

    def slots(self, block_table: tuple[int, ...], begin: int, end: int) -> list[int]:
        """Return the contents of token positions `begin` to `end` of a sequence, maybe fewer."""
        size, slots = self.block_size_tokens, []
        for block_id in block_table[begin // size : -(-end // size)]:
            slots += self._blocks[block_id]
        return slots[begin % size : begin % size + end - begin]

    def write_slot(self, block_table: tuple[int, ...], index: int, content: int) -> None:
        """Set the content of token position `index` of a sequence."""
        self._blocks[block_table[index // self.block_size_tokens]][index % self.block_size_tokens] = content

    def prefix_before(self, block_table: tuple[int, ...], index: int) -> int:
        """Return the content of the position before `index`, or the start value for index 0."""
        return self.slot(block_table, index - 1) if index else START
