"""Merges block ids into contiguous runs, and checks them before addresses are computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CopyRange = tuple[int, int, int]
"""(remote address, local address, size in bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """`num_blocks` blocks that are contiguous on both sides: from `source` in the owner's memory, to `own`
    here."""

    source: int
    own: int
    num_blocks: int


def runs(source: Sequence[int], own: Sequence[int]) -> Iterator[BlockRun]:
    """Yield the pairs (source block, own block) in order, merged into contiguous runs.

    Raises ValueError if the two sequences differ in length.
    """
    if len(source) != len(own):
        raise ValueError(f"{len(source)} source blocks for {len(own)} own blocks")
    begin = 0
    for end in range(1, len(source) + 1):
        if end == len(source) or source[end] != source[end - 1] + 1 or own[end] != own[end - 1] + 1:
            yield BlockRun(source=source[begin], own=own[begin], num_blocks=end - begin)
            begin = end


def check_ids(block_ids: Sequence[int], num_blocks: int, whose: str) -> None:
    """Raise ValueError for a block id outside the memory. `whose`: names the memory in the error."""
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise ValueError(f"block {block_id} is outside {whose} memory of {num_blocks} blocks")
