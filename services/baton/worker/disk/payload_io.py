"""`PayloadIo`: copies payloads between the staging buffer and a file."""

from collections.abc import Sequence
from typing import Protocol

from baton.transfer.backends.host_memory import Bytes
from baton.worker.disk.os_file import RawFile


class PayloadIo(Protocol):
    """Reads and writes payloads at offsets of a file. Each call blocks its thread and raises OSError."""

    def read(self, offsets: Sequence[int], rows: Sequence[int]) -> None:
        """Read payloads into rows of the staging buffer. Raises ShortRead if the file ends before.

        After an error the rows have any content.
        """
        ...

    def write(self, rows: Sequence[int], offsets: Sequence[int]) -> None:
        """Write rows of the staging buffer. After an error any part of them may have been written."""
        ...

    def check(self) -> None:
        """Raise NoAnswer if an earlier copy may still run. Further copies then raise it, too."""
        ...

    def close(self) -> None:
        """Release what the copies need. Call it after the last copy and before the file is closed."""
        ...


class PlainPayloads:
    """Implements `PayloadIo` with one system call a payload. Threads read several at a time."""

    def __init__(self, file: RawFile, staging: Bytes) -> None:
        """`staging`: [num_rows, block_bytes] uint8."""
        self._file, self._staging = file, staging

    def read(self, offsets: Sequence[int], rows: Sequence[int]) -> None:
        for offset, row in zip(offsets, rows, strict=True):
            self._file.read_into(self._staging[row], offset)

    def write(self, rows: Sequence[int], offsets: Sequence[int]) -> None:
        for row, offset in zip(rows, offsets, strict=True):
            self._file.write(self._staging[row], offset)

    def check(self) -> None:
        """Do nothing: a system call ends before its caller goes on."""

    def close(self) -> None:
        """Do nothing: the file belongs to the caller."""
