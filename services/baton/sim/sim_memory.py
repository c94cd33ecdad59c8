"""KV memory without the bytes: each slot holds a number that stands for the whole prefix up to its token.

So a wrong block is a wrong number.
"""

from collections.abc import Iterable

from baton.core.kv.block_hash import token_ids
from baton.engine.kv_cache.checksum import START, slots_of

EMPTY = 0


def contents(values: Iterable[int]) -> list[int]:
    """The slots of a whole sequence of token ids."""
    slots: list[int] = slots_of(token_ids(values)).tolist()
    return slots


class SimMemory:
    """`num_blocks` blocks of `block_size_tokens` slots."""

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._blocks = [[EMPTY] * block_size_tokens for _ in range(num_blocks)]

    def block(self, block_id: int) -> tuple[int, ...]:
        return tuple(self._blocks[block_id])

    def write_block(self, block_id: int, content: Iterable[int]) -> None:
        self._blocks[block_id][:] = content

    def slot(self, block_table: tuple[int, ...], index: int) -> int:
        return self._blocks[block_table[index // self.block_size_tokens]][index % self.block_size_tokens]

    def write_slot(self, block_table: tuple[int, ...], index: int, content: int) -> None:
        self._blocks[block_table[index // self.block_size_tokens]][index % self.block_size_tokens] = content

    def prefix_before(self, block_table: tuple[int, ...], index: int) -> int:
        """The content that slot `index` continues."""
        return self.slot(block_table, index - 1) if index else START
