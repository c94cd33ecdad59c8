"""The memory regions of an owner: its device memory, then its slower tiers.

Announcements number the blocks of all regions in one sequence: the ids of the second region follow those of
the first.
"""

from collections.abc import Sequence
from itertools import accumulate

from baton.core.kv.kv_layout import KvMemory
from baton.transfer.backend import KvDescriptor

MAX_REGIONS = 2
"""Regions that a reader of this release can read from: device and host memory."""


class OwnerRegions:
    """The regions of one owner. memories: at least one, in the order of the hello reply."""

    def __init__(self, memories: Sequence[KvMemory]) -> None:
        self.memories = tuple(memories)
        self._ends = tuple(accumulate(memory.num_blocks for memory in memories))

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all regions."""
        return self._ends[-1]

    def region_of(self, block_id: int) -> int:
        """Return the index of the region that has the block. Raises ValueError for an id that is too
        large."""
        for index, end in enumerate(self._ends):
            if block_id < end:
                return index
        raise ValueError(f"block {block_id} is outside the owner's memory of {self.num_blocks} blocks")

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        """Return where to read blocks, which must be of one region."""
        index = self.region_of(block_ids[0])
        begin = self._ends[index] - self.memories[index].num_blocks
        return KvDescriptor(memory=self.memories[index], block_ids=tuple(block_id - begin for block_id in block_ids))
