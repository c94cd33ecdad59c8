"""Allocates page-aligned memory directly from the operating system."""

import contextlib
import mmap


def allocate_anonymous(num_bytes: int) -> mmap.mmap:
    """Map private anonymous memory, zeroed on first access, with huge pages if the kernel offers them.

    Huge pages speed up copies between processes and sequential scans. Raises OSError if there is not enough
    memory.
    """
    segment = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            segment.madvise(mmap.MADV_HUGEPAGE)
    return segment
