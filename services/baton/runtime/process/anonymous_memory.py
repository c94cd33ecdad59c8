"""Memory straight from the system."""

import contextlib
import mmap


def allocate_anonymous(num_bytes: int) -> mmap.mmap:
    """Private, page-aligned, zeroed when touched; huge pages where the kernel gives them, which makes copies
    between processes cheaper, and going over it from one end to the other. Raises OSError when there is not
    enough."""
    segment = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            segment.madvise(mmap.MADV_HUGEPAGE)
    return segment
