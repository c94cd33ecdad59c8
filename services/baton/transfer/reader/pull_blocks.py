"""Tracks which blocks of one pull are announced, waiting, being read, and received.

Pure bookkeeping of integers.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.messages.peer_messages import KvReady
from baton.transfer.integrity.validate_read import AnnouncedBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Announced blocks that are read together, and the own block ids to read them into, in the same order."""

    blocks: tuple[AnnouncedBlock, ...]
    own: tuple[int, ...]


class PullBlocks:
    """The blocks of one pull, by index in the blocks that the reader needs, over all block tables.

    expected: locally computed hashes of the leading ones
    have_blocks: number of leading blocks that need not be pulled
    """

    def __init__(self, expected: Sequence[BlockHash], have_blocks: int) -> None:
        self.have_blocks = have_blocks
        self._expected = expected
        self._announced: dict[int, AnnouncedBlock] = {}
        self._receiving: dict[int, int] | None = None
        self._queue: deque[int] = deque()
        self._reading: set[int] = set()
        self._received: set[int] = set()

    @property
    def has_memory(self) -> bool:
        """True once the own blocks to read into are known."""
        return self._receiving is not None

    @property
    def any_announced(self) -> bool:
        """True if the owner has announced a block."""
        return bool(self._announced)

    @property
    def any_waiting(self) -> bool:
        """True if blocks wait to be read."""
        return bool(self._queue)

    @property
    def num_reading(self) -> int:
        """Number of blocks that are being read."""
        return len(self._reading)

    @property
    def num_received(self) -> int:
        """Number of blocks that were read and validated."""
        return len(self._received)

    def problem(self, message: KvReady, num_owner_blocks: int) -> str:
        """Return what is wrong with an announcement, or an empty string.

        Call it before using any field of it.
        """
        count, begin = len(message.block_ids), message.first_block_index
        if not count == len(message.generations) == len(message.hashes):
            return "block_ids, generations and hashes have different lengths"
        if any(not 0 <= block_id < num_owner_blocks for block_id in message.block_ids):
            return f"a block id is outside the owner's memory of {num_owner_blocks} blocks"
        expected = self._expected[begin : begin + count]
        if any(own not in (announced, NO_HASH) for own, announced in zip(expected, message.hashes, strict=False)):
            return "a hash differs from the hash of the prompt's block"
        if self._receiving is not None and any(
            index >= self.have_blocks and index not in self._receiving for index in range(begin, begin + count)
        ):
            return "more blocks than the prompt has"
        return ""

    def announce(self, message: KvReady) -> None:
        """Record a valid announcement. It changes nothing for blocks that are being read or were received."""
        for offset, block_id in enumerate(message.block_ids):
            index = message.first_block_index + offset
            if index in self._received or index in self._reading:
                continue
            is_new = index not in self._announced
            self._announced[index] = AnnouncedBlock(
                index=index,
                block_id=block_id,
                generation=message.generations[offset],
                block_hash=message.hashes[offset],
            )
            if is_new and self._receiving is not None and index in self._receiving:
                self._queue.append(index)

    def first_unannounced(self) -> int:
        """Return the index of the first block that was not announced."""
        index = self.have_blocks
        while index in self._announced or index in self._received:
            index += 1
        return index

    def receive_into(self, receiving: Mapping[int, int], have_blocks: int) -> None:
        """Set the own block ids by index. Announced blocks now wait to be read."""
        self._receiving = dict(receiving)
        self.have_blocks = have_blocks
        self._queue.extend(index for index in sorted(self._announced) if index in self._receiving)

    def begin_read(self, max_blocks: int, region_of: Callable[[int], int]) -> Slice:
        """Take at most `max_blocks` waiting blocks of one region as a slice that is being read.

        region_of: returns the owner's region that has a block id.
        """
        receiving = self._receiving or {}
        blocks: list[AnnouncedBlock] = []
        while self._queue and len(blocks) < max_blocks:
            block = self._announced[self._queue[0]]
            if blocks and region_of(block.block_id) != region_of(blocks[0].block_id):
                break
            self._queue.popleft()
            blocks.append(block)
        self._reading.update(block.index for block in blocks)
        return Slice(blocks=tuple(blocks), own=tuple(receiving[block.index] for block in blocks))

    def end_read(self, part: Slice) -> None:
        """Record that a slice is no longer being read."""
        self._reading.difference_update(block.index for block in part.blocks)

    def received(self, block: AnnouncedBlock) -> None:
        """Record that a block was read and validated."""
        self._received.add(block.index)

    def forget(self, part: Slice) -> None:
        """Forget the announcement of these blocks, so that they must be announced again."""
        for block in part.blocks:
            del self._announced[block.index]

    def lose_memory(self, part: Slice) -> None:
        """Give up ownership of the own blocks of a slice, because they are quarantined."""
        if self._receiving is not None:
            for block in part.blocks:
                del self._receiving[block.index]

    def stop(self) -> list[int]:
        """Read nothing more.

        Returns the own blocks that were not received and that no running read writes.
        """
        self._queue.clear()
        return [
            own
            for index, own in (self._receiving or {}).items()
            if index not in self._received and index not in self._reading
        ]

    def received_into(self) -> list[int]:
        """Return the own blocks that were received."""
        return [own for index, own in (self._receiving or {}).items() if index in self._received]

    def missing(self) -> dict[int, int]:
        """Return the own block ids that were not received, by index."""
        return {index: own for index, own in (self._receiving or {}).items() if index not in self._received}
