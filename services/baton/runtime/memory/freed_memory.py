"""Returns memory that this process has freed, but glibc still holds, to the system.

glibc keeps the memory of threads that once needed much: a gateway kept 150 MiB after it had tokenized a text
of a MiB.
"""

import asyncio
import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECK_S = 3.0
"""Interval of checks. A check, or a release, takes up to some milliseconds in a thread."""
KEPT_BYTES = 32 * 2**20
"""Growth of resident or of freed memory, since the last release, up to which nothing is released."""
LARGE_BYTES = 512 * 1024
"""Size from which on glibc returns memory immediately, after `limit_freed_memory`."""
MAX_HEAPS = 4
"""Heaps that the threads of a process share, after `limit_freed_memory`."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt`, see mallopt(3)."""
_STATM = Path("/proc/self/statm")
_MALLINFO_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS]


@dataclass(frozen=True, slots=True)
class HeapSize:
    """Memory of this process. A value that the system does not say is 0.

    resident_bytes: memory in RAM.
    freed_bytes: memory that glibc holds free, what it has already returned to the system included.
    """

    resident_bytes: int
    freed_bytes: int

    def has_grown_from(self, old: "HeapSize") -> bool:
        """True if a release may return much more than the one that left `old`.

        Memory that is in use during a release, and is freed later, shows only in `freed_bytes`. Memory that
        is taken and freed between two checks shows only in `resident_bytes`.
        """
        return self.resident_bytes > old.resident_bytes + KEPT_BYTES or self.freed_bytes > old.freed_bytes + KEPT_BYTES

    def lowest(self, other: "HeapSize") -> "HeapSize":
        """Return the lower value of each field."""
        return HeapSize(min(self.resident_bytes, other.resident_bytes), min(self.freed_bytes, other.freed_bytes))


def limit_freed_memory() -> None:
    """Make glibc return large pieces of memory when they are freed, and keep few heaps. Call it at the start.

    By default glibc raises its thresholds to 32 MiB after the first large piece, and each thread may get a
    heap of its own, whose end `trim_heap` does not return. For processes whose large pieces live long or are
    rare: each one costs a system call and page faults. Does nothing without glibc.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_M_MMAP_THRESHOLD, LARGE_BYTES), (_M_TRIM_THRESHOLD, LARGE_BYTES)):
            mallopt(parameter, value)
        mallopt(_M_ARENA_MAX, MAX_HEAPS)


def trim_heap() -> None:
    """Return freed memory to the system. Does nothing without glibc."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def heap_size() -> HeapSize:
    """Return the memory of this process."""
    return HeapSize(resident_bytes(), _freed_bytes())


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not say."""
    with suppress(OSError):
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _freed_bytes() -> int:
    """Return the bytes that glibc holds free; 0 without glibc 2.33 or newer."""
    with suppress(AttributeError, OSError):
        mallinfo2: Any = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _MallInfo
        return int(mallinfo2().fordblks)
    return 0


async def trim_heap_forever(check_s: float = CHECK_S) -> None:
    """Return freed memory to the system whenever the process has grown since the last time, until
    cancelled."""
    lowest = await asyncio.to_thread(heap_size)
    while True:
        await asyncio.sleep(check_s)
        now = await asyncio.to_thread(heap_size)
        if now.has_grown_from(lowest):
            await asyncio.to_thread(trim_heap)
            lowest = await asyncio.to_thread(heap_size)
        else:
            lowest = lowest.lowest(now)
