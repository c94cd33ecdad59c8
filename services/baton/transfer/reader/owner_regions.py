"""The memory regions of an owner, as one transfer backend reads them: its device memory, then its slower
tiers.

Announcements number the blocks of all regions in one sequence: the ids of the second region follow those of
the first.
"""

from collections.abc import Sequence
from itertools import accumulate

from baton.core.errors import LayoutMismatch
from baton.core.ids import WorkerRef
from baton.core.kv.kv_layout import KvMemory
from baton.transfer.backend import KvDescriptor

MAX_REGIONS = 2
"""Regions that a reader of this release can read from: device and host memory."""
MAX_BLOCKS = 2**40
"""Most blocks of one region. A reply with more is refused."""


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

    @property
    def transfer(self) -> str:
        """Name of the backend that reads these regions."""
        return self.memories[0].transfer

    def announced_ids(self, source: KvDescriptor) -> tuple[int, ...]:
        """Return the ids of a descriptor's blocks in the numbering of announcements."""
        index = self.memories.index(source.memory)
        begin = self._ends[index] - self.memories[index].num_blocks
        return tuple(begin + block_id for block_id in source.block_ids)

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        """Return where to read blocks, which must be of one region."""
        index = self.region_of(block_ids[0])
        begin = self._ends[index] - self.memories[index].num_blocks
        return KvDescriptor(memory=self.memories[index], block_ids=tuple(block_id - begin for block_id in block_ids))


def regions_by_transfer(
    owner: WorkerRef, memories: Sequence[KvMemory], transfers: Sequence[str]
) -> tuple[OwnerRegions, ...]:
    """Return the regions that an owner has described, for each of the reader's backends in their order.

    transfers: names of the reader's backends. Regions without a name are those of the first one.

    Raises LayoutMismatch if a region is not the owner's or has an impossible size, if a backend has too many
    regions, or if there are none for any backend of the reader.
    """
    for memory in memories:
        if not memory.owner.is_same_incarnation(owner):
            raise LayoutMismatch(f"memory: {owner} has described memory of {memory.owner}")
        if not 1 <= memory.num_blocks <= MAX_BLOCKS:
            raise LayoutMismatch(f"num_blocks: a region has {memory.num_blocks} blocks; must be 1 to {MAX_BLOCKS}")
    found: list[OwnerRegions] = []
    for transfer in transfers:
        own_names = (transfer, "") if transfer == transfers[0] else (transfer,)
        regions = [memory for memory in memories if memory.transfer in own_names]
        if len(regions) > MAX_REGIONS:
            raise LayoutMismatch(f"memory: the owner has {len(regions)} regions for {transfer}; at most {MAX_REGIONS}")
        if regions:
            found.append(OwnerRegions(regions))
    if not found:
        theirs = ", ".join(dict.fromkeys(memory.transfer for memory in memories)) or "none of them"
        raise LayoutMismatch(
            f"transfer: this worker has {', '.join(transfers)}, the owner {theirs}; give both the same --transfer, "
            "or auto"
        )
    sizes = {tuple(memory.num_blocks for memory in regions.memories) for regions in found}
    if len(sizes) > 1:
        raise LayoutMismatch(
            f"num_blocks: the regions of {owner} differ between its transfer backends: {sorted(sizes)}"
        )
    return tuple(found)
