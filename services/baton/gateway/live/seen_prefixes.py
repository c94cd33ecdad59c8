"""Remembers the block hashes of recent prompts, for the highest prefix hit rate that was possible."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from baton.core.kv.block_hash import BlockHash

MAX_BLOCKS = 65_536
"""Blocks to remember: about a million prompt tokens in blocks of 16. They take 11 MiB."""
MAX_PROMPT_BLOCKS = 4_096
"""Leading blocks of one prompt to look at, which takes about 1 ms."""


class SeenPrefixes:
    """The blocks of recent prompts of one gateway, the oldest of which are forgotten first."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # a dict's first key is slow to find after deletions

    def add(self, hashes: Sequence[BlockHash]) -> int:
        """Remember a prompt. Return the number of its leading blocks that were seen before."""
        blocks = self._blocks
        num_seen, is_prefix = 0, True
        for block in islice(hashes, min(MAX_PROMPT_BLOCKS, self._max_blocks)):
            if block in blocks:
                blocks.move_to_end(block)
                num_seen += is_prefix
            else:
                is_prefix = False  # a hash covers all blocks before it
                blocks[block] = None
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)
        return num_seen
