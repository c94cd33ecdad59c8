"""Make the pages of a worker's memory real while it serves already.

Fresh anonymous memory is a promise: each page is found and cleared when it is first written, which took up to
2.7 s a GiB on a virtual machine whose host takes idle memory back (2026-11-21). Nobody should wait for that
at start, nor in the middle of a pull.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: as if every page were written, without changing what is in it."""
PREFAULTING = "kv-touching"
"""The name of a thread that does it, for who wants to wait for its end."""
_STEP_BYTES = 2 * 2**20
_LOWEST_PRIORITY = 19
_REST = 5.0
"""Times what a step took, before the next one: a virtual machine's core stands still while its host looks for
memory."""


def prefault_in_background(address: int, num_bytes: int) -> Callable[[], None]:
    """Touch `num_bytes` from the page-aligned `address` on, in a thread that yields to all others; returns
    what stops it, which must be called before the memory is given back. Where the system cannot do it, pages
    come into being when they are written, as ever."""
    if sys.platform != "linux":
        return lambda: None
    stopped = threading.Event()
    thread = threading.Thread(target=_touch, args=(address, num_bytes, stopped), name=PREFAULTING, daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


def _touch(address: int, num_bytes: int, stopped: threading.Event) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would hold the interpreter's lock meanwhile
    for offset in range(0, num_bytes, _STEP_BYTES):
        step, began_s = ctypes.c_size_t(min(_STEP_BYTES, num_bytes - offset)), time.monotonic()
        if madvise(ctypes.c_void_p(address + offset), step, _MADV_POPULATE_WRITE) != 0:
            return
        if stopped.wait(_REST * (time.monotonic() - began_s)):
            return
