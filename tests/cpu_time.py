"""Measures the CPU time of the calling thread, in seconds of a core of known speed."""

import gc
import time
from types import TracebackType

ITERATIONS = 2_000
ITERATIONS_PER_S = 30e6
"""Iterations of `_loop_s` per second on the core for which tests state their limits.

An EPYC core with AVX512-BF16 does 30 to 36 million, and 22 million while its neighbours compute.
"""


class CpuTime:
    """Context manager that measures the CPU seconds of its body, without garbage collections.

    A collection looks at the objects of all tests in this process, which can take longer than the body.
    A loop is timed before and after the body. If it is slower than `ITERATIONS_PER_S`, the seconds of the
    body are reduced by the same factor, because shared machines are slower at some times.
    """

    spent_s = 0.0

    def __enter__(self) -> "CpuTime":
        self._collects = gc.isenabled()
        gc.disable()
        self._loop_s = _loop_s()
        self._began_s = time.thread_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spent_s = time.thread_time() - self._began_s
        loop_s = (self._loop_s + _loop_s()) / 2
        self.spent_s = spent_s * min(1.0, ITERATIONS / ITERATIONS_PER_S / loop_s)
        if self._collects:
            gc.enable()


def _loop_s() -> float:
    """Return the CPU seconds of `ITERATIONS` iterations of a loop."""
    began_s, total = time.thread_time(), 0
    for number in range(ITERATIONS):
        total += number
    return time.thread_time() - began_s
