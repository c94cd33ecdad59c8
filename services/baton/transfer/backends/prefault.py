"""Prefaults KV memory in the background, so that no request waits for page faults.

Linux allocates and clears an anonymous page when it is first written. On a virtual machine whose host
reclaims idle memory this took up to 2.7 s per GiB (2026-11-21). Doing it in a background thread delays
neither startup nor a pull. The thread nearly stops while the process computes: a decode step waits for its
slowest thread, so 16 % of one core made all steps up to 15 % slower.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later. Populates pages as if they were written, without changing their content."""
PREFAULT_THREAD_NAME = "kv-prefault"
_STEP_BYTES = 2 * 2**20
_LOWEST_PRIORITY = 19
_PAUSE_FACTOR = 5.0
"""Pause after each step, as a multiple of the step's duration. A virtual machine's core is blocked while its
host finds memory."""
_BUSY_SHARE = 0.25
"""CPU time of the process, as a share of the time that passed, above which it computes. A thread that
prefaults other memory uses a sixth."""
_BUSY_PAUSE_S = 0.05
"""Pause before a process that computes is looked at again."""
_LONGEST_PAUSE_S = 1.0
"""Longest pause between two steps, so that a process that is always busy is prefaulted, too."""


def prefault_in_background(address: int, num_bytes: int) -> Callable[[], None]:
    """Prefault `num_bytes` from the page-aligned `address` in a thread of the lowest priority.

    Returns a function that stops the thread and waits for it. Call it before the memory is freed. On systems
    without MADV_POPULATE_WRITE nothing happens, and pages are allocated when they are first written.
    """
    if sys.platform != "linux":
        return lambda: None
    stopped = threading.Event()
    thread = threading.Thread(
        target=_prefault, args=(address, num_bytes, stopped), name=PREFAULT_THREAD_NAME, daemon=True
    )
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


def _prefault(address: int, num_bytes: int, stopped: threading.Event) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would hold the GIL during the call
    for offset in range(0, num_bytes, _STEP_BYTES):
        step, started_s = ctypes.c_size_t(min(_STEP_BYTES, num_bytes - offset)), time.monotonic()
        if madvise(ctypes.c_void_p(address + offset), step, _MADV_POPULATE_WRITE) != 0:
            return
        if _pause(stopped, _PAUSE_FACTOR * (time.monotonic() - started_s)):
            return


def _pause(stopped: threading.Event, pause_s: float) -> bool:
    """Wait until the process does not compute, at least `pause_s` and at most `_LONGEST_PAUSE_S`.

    Returns True as soon as `stopped` is set, else False.
    """
    ends_s = time.monotonic() + _LONGEST_PAUSE_S
    while True:
        began_s, used_s = time.monotonic(), time.process_time()
        if stopped.wait(pause_s):
            return True
        now_s = time.monotonic()
        if now_s >= ends_s or time.process_time() - used_s < _BUSY_SHARE * (now_s - began_s):
            return False
        pause_s = _BUSY_PAUSE_S
