"""Remembers the block hashes of recent prompts, for the highest prefix hit rate that was possible."""

from collections.abc import Sequence

from baton.core.kv.block_hash import BlockHash

MAX_BLOCKS = 65_536
"""Blocks to remember: about a million prompt tokens in blocks of 16, in at most 10 MiB."""


class SeenPrefixes:
    """The blocks of recent prompts of one gateway, the oldest of which are forgotten first."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[bytes, None] = {}

    def add(self, hashes: Sequence[BlockHash]) -> int:
        """Remember a prompt. Return the number of its leading blocks that were seen before."""
        blocks = self._blocks
        num_seen = 0
        for block in hashes:  # a hash covers all blocks before it, so the first unknown block ends the prefix
            if block not in blocks:
                break
            num_seen += 1
        for block in hashes[: self._max_blocks]:
            blocks.pop(block, None)  # to the end of the order
            blocks[block] = None
        while len(blocks) > self._max_blocks:
            del blocks[next(iter(blocks))]
        return num_seen
