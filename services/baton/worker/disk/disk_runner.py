"""`DiskRunner`: runs reads and writes of a disk outside of the event loop."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

ResultT = TypeVar("ResultT")

NUM_READERS = 8
"""Threads that read. A disk serves several requests at a time, and a slow one does so, too."""


class DiskRunner(Protocol):
    """Runs jobs of a disk. Reads run beside each other, writes one after the other.

    writes_busy_s: processor seconds of the writes so far
    """

    writes_busy_s: float

    async def read(self, job: Callable[[], ResultT], num_bytes: int) -> ResultT:
        """Run a job that reads `num_bytes`. Raises what the job raises."""
        ...

    async def write(self, job: Callable[[], ResultT], num_bytes: int) -> ResultT:
        """Run a job that writes `num_bytes`. Raises what the job raises."""
        ...

    def close(self) -> None:
        """Release the threads. It does not wait for a job that a failed disk never ends."""
        ...


class DiskThreads:
    """Implements `DiskRunner` with threads."""

    def __init__(self) -> None:
        self.writes_busy_s = 0.0
        self._readers = ThreadPoolExecutor(max_workers=NUM_READERS, thread_name_prefix="kv-disk-read")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disk-write")

    async def read(self, job: Callable[[], ResultT], num_bytes: int) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._readers, job)

    async def write(self, job: Callable[[], ResultT], num_bytes: int) -> ResultT:
        def measured() -> ResultT:
            began_s = time.thread_time()
            try:
                return job()
            finally:
                self.writes_busy_s += time.thread_time() - began_s

        return await asyncio.get_running_loop().run_in_executor(self._writer, measured)

    def close(self) -> None:
        self._readers.shutdown(wait=False)
        self._writer.shutdown(wait=False)
