"""The file of a packed model: sections of bytes, then an index, then where the index is.

Sections begin at pages, so that they can be mapped. The index has a checksum of each section.
"""

import json
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.core.errors import BatonError
from baton.runtime.user_cache import is_trusted

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"baton weights 1\n"
_TRAILER = struct.Struct("<16sQQ32s")
"""Magic number, offset and length of the index, and its digest."""
_ALIGNMENT = mmap.ALLOCATIONGRANULARITY
_PIECE_BYTES = 64 << 10
"""Bytes whose 64-bit words are added up for the checksum."""
_WRITE_BYTES = 16 << 20
_WINDOW_BYTES = 1 << 30
"""Bytes that are mapped together while a file grows. Each mapping takes a file descriptor."""


class ImageUnusable(BatonError):
    """The file cannot be used. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes of a file, and their checksum."""

    offset: int
    num_bytes: int
    checksum: str


def checksum(data: Bytes) -> str:
    """Return a hex digest of the sums of 64-bit words of each 64 KiB, and of the rest as it is.

    It takes as long as reading the memory. It finds bytes that are zero, cut off, or from elsewhere.
    """
    digest = blake2b(len(data).to_bytes(8, "little"), digest_size=16)
    whole = len(data) // _PIECE_BYTES * _PIECE_BYTES
    if whole:
        words = data[:whole].view("<u8").reshape(-1, _PIECE_BYTES // 8)
        digest.update(words.sum(axis=1, dtype=np.uint64).tobytes())
    digest.update(data[whole:].tobytes())
    return digest.hexdigest()


class ImageWriter:
    """Appends sections to a new file, which can be read at once."""

    def __init__(self, path: Path, *, max_bytes: int, reserved_bytes: int = 0) -> None:
        """max_bytes: largest size of the file. reserved_bytes: left free on the disk. Raises OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._max_bytes = max_bytes
        self._reserved_bytes = reserved_bytes
        self._end = 0
        self._window_begin = 0
        self._window = np.empty(0, np.uint8)

    @property
    def num_bytes(self) -> int:
        """Size of the file so far."""
        return self._end

    def append(self, data: Bytes) -> Section:
        """Write a section. Raises OSError if the disk is full or the file would become too large."""
        offset = _aligned(self._end)
        self._write(offset, data)
        return Section(offset, len(data), checksum(data))

    def mapped(self, section: Section) -> Bytes:
        """Return a section as memory that can only be read, and that all processes share."""
        if not section.num_bytes:
            return np.empty(0, np.uint8)
        begin, end = section.offset - self._window_begin, section.offset - self._window_begin + section.num_bytes
        if begin < 0 or end > len(self._window):
            size = max(_WINDOW_BYTES, _aligned(section.num_bytes))
            os.ftruncate(self._file, section.offset + size)  # a hole, until it is written
            self._window_begin, self._window = section.offset, _map(self._file, section.offset, size)
            begin, end = 0, section.num_bytes
        return self._window[begin:end]

    def finish(self, index: dict[str, Any]) -> None:
        """Write the index, and cut off what follows it. Raises OSError."""
        text = np.frombuffer(json.dumps(index).encode(), np.uint8)
        offset = self._end
        self._write(offset, text)
        digest = blake2b(text.tobytes(), digest_size=32).digest()
        self._write(self._end, np.frombuffer(_TRAILER.pack(_MAGIC, offset, len(text), digest), np.uint8))
        os.ftruncate(self._file, self._end)

    def close(self) -> None:
        """Close the file. What was mapped stays."""
        os.close(self._file)

    def _write(self, offset: int, data: Bytes) -> None:
        end = offset + len(data)
        if end > self._max_bytes:
            raise OSError(f"{end} bytes; must be at most {self._max_bytes}, set --weight-cache to more")
        disk = os.fstatvfs(self._file)
        if disk.f_bavail * disk.f_frsize < len(data) + self._reserved_bytes:
            raise OSError(f"less than {self._reserved_bytes >> 20} MiB of the disk would be left")
        left = memoryview(data.data)
        while left:
            left = left[os.pwrite(self._file, left[:_WRITE_BYTES], end - len(left)) :]
        self._end = end


class ImageFile:
    """A file that is mapped for reading. Processes that map it share its memory."""

    def __init__(self, path: Path) -> None:
        """Map it and read its index. Raises ImageUnusable if it is damaged or not this user's, OSError if it
        cannot be read."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            facts = os.fstat(file)
            if not is_trusted(facts):
                raise ImageUnusable("it belongs to another user, or others may write it")
            if facts.st_size < _TRAILER.size:
                raise ImageUnusable(f"it has {facts.st_size} bytes")
            self._data = _map(file, 0, facts.st_size)
        finally:
            os.close(file)
        self.index = self._read_index()

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._data)

    def section(self, section: Section) -> Bytes:
        """Return the bytes of a section. Raises ImageUnusable if they are not those that were written."""
        begin, end = section.offset, section.offset + section.num_bytes
        if begin % _ALIGNMENT or not 0 <= begin <= end <= len(self._data):
            raise ImageUnusable(f"a section from byte {begin} to {end} is not within its {len(self._data)} bytes")
        data = self._data[begin:end]
        if checksum(data) != section.checksum:
            raise ImageUnusable(f"the bytes {begin} to {end} are damaged")
        return data

    def _read_index(self) -> Any:
        magic, offset, length, digest = _TRAILER.unpack(self._data[-_TRAILER.size :].tobytes())
        text = self._data[offset : offset + length].tobytes()
        if magic != _MAGIC or blake2b(text, digest_size=32).digest() != digest:
            raise ImageUnusable("its index is damaged")
        return json.loads(text)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _map(file: int, offset: int, num_bytes: int) -> Bytes:
    """Map a part of a file read-only, in huge pages if the file system has them."""
    mapping = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)
