"""KV memory without the bytes: each slot holds a number that stands for the whole prefix up to its token.

So a wrong block is a wrong number.
"""

from collections.abc import Iterable

EMPTY = 0
_START = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def extend(prefix: int, token_id: int) -> int:
    """The content of the slot of `token_id` after a slot of content `prefix` (splitmix64's mixing). Never EMPTY for real prefixes."""
    z = (prefix ^ (token_id + 1) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31) or 1


def contents(token_ids: Iterable[int], prefix: int = _START) -> list[int]:
    """The slots of a whole sequence."""
    slots = []
    for token_id in token_ids:
        prefix = extend(prefix, token_id)
        slots.append(prefix)
    return slots


def token_after(prefix: int, seed: int, sample_index: int, position: int, vocab_size: int) -> int:
    """The token that follows: a checkable function of the prompt, the sampling key and nothing else."""
    return extend(extend(extend(prefix, seed & 0xFFFFFFFF), sample_index), position) % vocab_size


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
        return self.slot(block_table, index - 1) if index else _START
