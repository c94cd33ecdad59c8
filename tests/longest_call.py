"""Measures for how long a function keeps other threads from running."""

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


def longest_call_s(work: Callable[..., object], *args: Any) -> float:
    """Return the CPU seconds of the longest line that `work(*args)` executes.

    The interpreter changes threads only between instructions, so this is at least the time for which others
    cannot run. It is the shortest of three runs, because a line may also contain time that a hypervisor took.
    """
    gc.freeze()  # as services do; a collection of all objects of the tests would take longer than most lines
    return min(_longest_line_s(work, *args) for _ in range(3))


def _longest_line_s(work: Callable[..., object], *args: Any) -> float:
    longest_s, last_s = 0.0, 0.0

    def trace(frame: FrameType, event: str, value: object) -> Any:
        nonlocal longest_s, last_s
        now_s = time.thread_time()
        longest_s = max(longest_s, now_s - last_s)
        last_s = time.thread_time()
        return trace

    def run() -> object:
        return work(*args)

    before = sys.gettrace()
    last_s = time.thread_time()
    sys.settrace(trace)
    try:
        result = run()
    finally:
        sys.settrace(before)
    del result  # only now: it takes as long as the result is large, and is no line of `work`
    return longest_s
