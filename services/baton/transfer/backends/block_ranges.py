"""Block ids as ranges of bytes: the only place where backends multiply."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """`num_blocks` blocks that are neighbours on both sides, from `source` in the owner's memory to `own` in
    ours."""

    source: int
    own: int
    num_blocks: int


def runs(source: Sequence[int], own: Sequence[int]) -> Iterator[BlockRun]:
    """Pairs of blocks, in order, neighbours joined. Raises ValueError when the two differ in length."""
    if len(source) != len(own):
        raise ValueError(f"{len(source)} source blocks for {len(own)} own blocks")
    begin = 0
    for end in range(1, len(source) + 1):
        if end == len(source) or source[end] != source[end - 1] + 1 or own[end] != own[end - 1] + 1:
            yield BlockRun(source=source[begin], own=own[begin], num_blocks=end - begin)
            begin = end


def check_ids(block_ids: Sequence[int], num_blocks: int, whose: str) -> None:
    """Raises ValueError for a block that is not in the memory: no address is ever computed from it."""
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise ValueError(f"block {block_id} is outside {whose} memory of {num_blocks} blocks")
