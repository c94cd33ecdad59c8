"""`BlockGrant`: which blocks admission gives to a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrant:
    """The blocks that admission gives to a sequence.

    num_blocks: length of each block table.
    first_blocks, num_covered_blocks, num_cached_blocks: see `EngineSequence`.
    entries: of the flat block table (`core.kv.kv_tables`) that get blocks, in order.
    cached: blocks in the cache for the first entries. The others get new blocks.
    """

    num_blocks: int
    first_blocks: tuple[int, ...]
    num_covered_blocks: int
    num_cached_blocks: int
    entries: Sequence[int]
    cached: list[int]

    @property
    def new_entries(self) -> Sequence[int]:
        """The entries that get new blocks."""
        return self.entries[len(self.cached) :]
