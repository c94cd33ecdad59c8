"""Returns memory that this process has freed, but glibc still holds, to the system.

glibc keeps the memory of threads that once needed much: a gateway kept 150 MiB after it had tokenized a text
of a MiB.
"""

import asyncio
import ctypes
import os
from contextlib import suppress
from pathlib import Path

CHECK_S = 3.0
"""Interval of checks. A release takes some milliseconds in a thread."""
KEPT_BYTES = 32 * 2**20
"""Memory above the lowest that the process ever had, up to which nothing is released."""
_STATM = Path("/proc/self/statm")


def trim_heap() -> None:
    """Return freed memory to the system. Does nothing without glibc."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not say."""
    with suppress(OSError):
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


async def trim_heap_forever(check_s: float = CHECK_S) -> None:
    """Return freed memory to the system from time to time, until cancelled."""
    lowest_bytes = resident_bytes()
    while True:
        await asyncio.sleep(check_s)
        now_bytes = resident_bytes()
        if now_bytes > lowest_bytes + KEPT_BYTES:
            await asyncio.to_thread(trim_heap)
        lowest_bytes = min(lowest_bytes, now_bytes)
