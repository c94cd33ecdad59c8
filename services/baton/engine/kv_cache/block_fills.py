"""The reads from other workers that fill blocks, as a state per block.

A block is readable until it is allocated to receive KV. It is then receiving until its read was validated
(the block is readable), has failed (void) or was abandoned while it may still write (quarantined, then void).
A void block is readable again once nothing refers to it: its next user computes or receives its content anew.
"""

from enum import Enum

from baton.engine.state.require import require


class BlockFill(Enum):
    """State of the read from another worker that fills a block.

    NONE: no read; the block is readable.
    RECEIVING: a read is in progress.
    QUARANTINED: the read was abandoned, but may still write to the block.
    VOID: the read has failed or ended, and the sequence that was to use the block still refers to it.
    """

    NONE = "none"
    RECEIVING = "receiving"
    QUARANTINED = "quarantined"
    VOID = "void"


class BlockFills:
    """The `BlockFill` of each block, with the number of receiving and of quarantined ones."""

    def __init__(self, num_blocks: int) -> None:
        self._fill = [BlockFill.NONE] * num_blocks
        self.num_receiving = 0
        self.num_quarantined = 0

    def of(self, block_id: int) -> BlockFill:
        """Return the state of a block."""
        return self._fill[block_id]

    def is_readable(self, block_id: int) -> bool:
        """Return True if no read is to fill the block or may still write to it."""
        return self._fill[block_id] is BlockFill.NONE

    def may_be_written(self, block_id: int) -> bool:
        """Return True if a read may still write to the block."""
        return self._fill[block_id] in (BlockFill.RECEIVING, BlockFill.QUARANTINED)

    def receive(self, block_id: int) -> None:
        """Begin the reception of a block that was allocated for it."""
        self._fill[block_id] = BlockFill.RECEIVING
        self.num_receiving += 1

    def received(self, block_id: int) -> None:
        """End the reception of a block whose read was validated. Raises ValueError if it is not receiving."""
        self._end_receiving(block_id, BlockFill.NONE)

    def drop(self, block_id: int) -> None:
        """End the reception of a block that will not be filled. Raises ValueError if it is not receiving."""
        self._end_receiving(block_id, BlockFill.VOID)

    def quarantine(self, block_id: int) -> None:
        """Quarantine a block whose read was abandoned. Raises ValueError if it is not receiving."""
        self._end_receiving(block_id, BlockFill.QUARANTINED)
        self.num_quarantined += 1

    def end_quarantine(self, block_id: int) -> None:
        """Record that the abandoned read has ended. Raises ValueError if the block is not quarantined."""
        if self._fill[block_id] is not BlockFill.QUARANTINED:
            raise ValueError(f"block {block_id} is not quarantined")
        self._fill[block_id] = BlockFill.VOID
        self.num_quarantined -= 1

    def reset(self, block_id: int) -> None:
        """Make a block readable to which nothing refers and no read can write."""
        self._fill[block_id] = BlockFill.NONE

    def check(self) -> None:
        """Check that the counts are right. Raises AssertionError."""
        require(self.num_receiving == self._fill.count(BlockFill.RECEIVING), "receiving count is wrong")
        require(self.num_quarantined == self._fill.count(BlockFill.QUARANTINED), "quarantined count is wrong")

    def _end_receiving(self, block_id: int, to: BlockFill) -> None:
        if self._fill[block_id] is not BlockFill.RECEIVING:
            raise ValueError(f"block {block_id} is not receiving")
        self._fill[block_id] = to
        self.num_receiving -= 1
