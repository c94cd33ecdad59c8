"""A simulated file of KV blocks: bytes that outlive their process, and faults that damage them."""

import errno
from random import Random
from typing import Any

from baton.worker.disk.disk_format import HEADER_BYTES, FileShape
from baton.worker.disk.os_file import ShortRead

NEVER = 2**62


class SimFile:
    """Bytes on a simulated disk. A second copy, which no fault changes, shows which of them are damaged.

    is_full: writes fail
    num_refused: writes that failed
    """

    def __init__(self, shape: FileShape) -> None:
        self.shape = shape
        self.is_full = False
        self.num_refused = 0
        self.content = bytearray()
        self._undamaged = bytearray(shape.file_bytes)

    def extend(self) -> None:
        """Fill the file with zeros up to its size."""
        self.content.extend(bytes(max(0, self.shape.file_bytes - len(self.content))))

    def clear(self) -> None:
        """Remove all content."""
        self.content = bytearray()
        self._undamaged = bytearray(self.shape.file_bytes)

    def write(self, data: bytes, offset: int) -> None:
        """Write all of `data`. Raises OSError if the disk is full."""
        if self.is_full:
            self.num_refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.content.extend(bytes(max(0, offset - len(self.content))))
        self.content[offset : offset + len(data)] = data
        self._undamaged[offset : offset + len(data)] = data

    def flip_bits(self, rng: Random, count: int) -> None:
        """Change random bits of random slots: half of the time of the header, otherwise of the payload."""
        shape = self.shape
        for _ in range(count):
            slot = rng.randrange(shape.num_slots)
            begin, size = shape.payload_offset(slot), shape.block_bytes
            if rng.random() < 0.5:
                begin, size = shape.header_offset(slot), HEADER_BYTES
            offset = begin + rng.randrange(size)
            if offset < len(self.content):
                self.content[offset] ^= 1 << rng.randrange(8)

    def truncate(self, rng: Random) -> None:
        """Remove a random part at the end of the payloads."""
        del self.content[self.shape.payload_offset(rng.randrange(self.shape.num_slots)) :]

    def has_damaged_payload(self, slot: int) -> bool:
        """True if a fault has changed the payload of a slot since it was written."""
        begin = self.shape.payload_offset(slot)
        return self._is_damaged(begin, begin + self.shape.block_bytes)

    def num_damaged_headers(self) -> int:
        """Return how many headers a fault has changed since they were written."""
        begins = map(self.shape.header_offset, range(self.shape.num_slots))
        return sum(self._is_damaged(begin, begin + HEADER_BYTES) for begin in begins)

    def _is_damaged(self, begin: int, end: int) -> bool:
        return self.content[begin:end] != self._undamaged[begin:end]


class OpenSimFile:
    """Implements `RawFile` for one process. After its end nothing is written."""

    def __init__(self, file: SimFile) -> None:
        self._file = file
        self._left = NEVER  # bytes until the process ends

    def end_after(self, num_bytes: int) -> None:
        """Write so many bytes more, and nothing after that."""
        self._left = num_bytes

    def read_into(self, buffer: Any, offset: int) -> None:
        view = memoryview(buffer).cast("B")
        content = self._file.content[offset : offset + len(view)]
        if len(content) < len(view):
            raise ShortRead(f"the file ends at byte {len(self._file.content)}")
        view[:] = content

    def write(self, data: Any, offset: int) -> None:
        content = bytes(memoryview(data).cast("B")[: self._left])
        self._left -= len(content)
        if content:
            self._file.write(content, offset)

    def sync(self) -> None:
        """Do nothing: no power is lost."""

    def close(self) -> None:
        """Do nothing: the content stays."""
