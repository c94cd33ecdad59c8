"""Measures the CPU time of the calling thread."""

import gc
import time
from types import TracebackType


class CpuTime:
    """Context manager that measures the CPU seconds of its body, without garbage collections.

    A collection looks at the objects of all tests in this process, which can take longer than the body.
    """

    spent_s = 0.0

    def __enter__(self) -> "CpuTime":
        self._collects = gc.isenabled()
        gc.disable()
        self._began_s = time.thread_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.spent_s = time.thread_time() - self._began_s
        if self._collects:
            gc.enable()
