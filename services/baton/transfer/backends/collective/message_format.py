"""The message that answers a two-sided read: a header, generation-table entries, then KV blocks.

| bytes | content |
| --- | --- |
| 0 to 63 | read id, number of blocks, and 1 if the read is granted, as little-endian integers; zeros |
| from 64 | entries of the blocks, 32 bytes each, then zeros |
| from the next multiple of 64 | the blocks |

The size of a message follows from the number of blocks. The answer to a refused read is its header only over
Gloo. NCCL must know the size before, so there zeros take the place of entries and blocks.
"""

import struct
from dataclasses import dataclass
from typing import Any, Protocol

from baton.core.ids import ReadId
from baton.core.kv.kv_layout import KvLayout
from baton.transfer.backend import MAX_READ_BYTES, GenerationEntry
from baton.transfer.integrity.generation_table import ENTRY_BYTES

HEADER_BYTES = 64
_HEADER = struct.Struct("<QII")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """Sizes of messages with blocks of one size."""

    block_bytes: int

    @classmethod
    def of(cls, layout: KvLayout) -> "MessageFormat":
        """Return the format for blocks of a layout."""
        return cls(block_bytes=layout.block_bytes)

    @property
    def max_blocks(self) -> int:
        """Most blocks of one message; at least 1."""
        return max(1, MAX_READ_BYTES // self.block_bytes)

    @property
    def max_bytes(self) -> int:
        """Size of the largest message."""
        return self.num_bytes(self.max_blocks)

    def blocks_at(self, num_blocks: int) -> int:
        """Return where the blocks begin in a message with so many."""
        return -(-(HEADER_BYTES + num_blocks * ENTRY_BYTES) // HEADER_BYTES) * HEADER_BYTES

    def num_bytes(self, num_blocks: int) -> int:
        """Return the size of a message with so many blocks."""
        return self.blocks_at(num_blocks) + num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHeader:
    """The header of a message. granted: False if the owner refused the read; then nothing or zeros follow."""

    read_id: ReadId
    num_blocks: int
    granted: bool

    def encode(self) -> bytes:
        """Return the header as `HEADER_BYTES` bytes."""
        return _HEADER.pack(self.read_id, self.num_blocks, self.granted).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> "MessageHeader":
        """Return the header at the beginning of a message."""
        read_id, num_blocks, granted = _HEADER.unpack_from(data)
        return cls(read_id=ReadId(read_id), num_blocks=num_blocks, granted=granted == 1)


class MessageMemory(Protocol):
    """Copies the blocks of a worker into messages, and those of messages into its memory.

    Methods may block for the time of a copy. They may be called from several threads at once, with different
    buffers.
    """

    def new_buffer(self) -> Any:
        """Allocate a buffer for messages of any size, [max_bytes] uint8."""
        ...

    def pack(self, buffer: Any, header: MessageHeader, block_ids: tuple[int, ...]) -> Any:
        """Write a message into the buffer: the blocks, then the entries as they are after that.

        block_ids: of both regions, in the numbering of announcements; empty if the read is refused.
        Returns the part of the buffer that is the message. It has no bytes that the buffer held before.
        """
        ...

    def expected(self, buffer: Any, num_blocks: int) -> Any:
        """Return the part of the buffer to receive a message of so many blocks into."""
        ...

    def header(self, buffer: Any) -> MessageHeader:
        """Return the header of the message in the buffer."""
        ...

    def unpack(self, buffer: Any, num_blocks: int, own: tuple[int, ...] | None) -> tuple[GenerationEntry, ...]:
        """Copy the blocks of a received message into own blocks and return the entries.

        own: None drops the blocks
        """
        ...
