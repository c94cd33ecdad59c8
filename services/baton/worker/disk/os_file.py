"""`RawFile`: reads and writes ranges of bytes of a file, and syncs it. Each call blocks its thread."""

import os
from collections.abc import Callable
from typing import Any, Protocol

_sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


class ShortRead(OSError):
    """The file ends before the bytes that were asked for."""


class NoAnswer(OSError):
    """A copy has not ended, and may still write its memory or the file. This says nothing of the content."""


class RawFile(Protocol):
    """A file of fixed size. All methods raise OSError. Several threads may call them at a time."""

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fill `buffer`, any writable bytes. Raises ShortRead if the file ends before."""
        ...

    def write(self, data: Any, offset: int) -> None:
        """Write all of `data`. After an error any part of it may have been written."""
        ...

    def sync(self) -> None:
        """Wait until what was written before is on the disk."""
        ...

    def close(self) -> None:
        """Release the file and its lock."""
        ...


class OsFile:
    """Implements `RawFile` over a descriptor, which it owns."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read_into(self, buffer: Any, offset: int) -> None:
        view = memoryview(buffer).cast("B")
        while view:
            count = os.preadv(self.fd, [view], offset)
            if not count:
                raise ShortRead(f"the file ends at byte {offset}; {len(view)} bytes more are needed")
            view, offset = view[count:], offset + count

    def write(self, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            count = os.pwrite(self.fd, view, offset)
            view, offset = view[count:], offset + count

    def sync(self) -> None:
        _sync_data(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
