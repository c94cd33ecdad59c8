"""Freed memory is returned to the system when the process has grown."""

import asyncio
import subprocess
import sys
import threading

import pytest

from baton.runtime.memory import freed_memory
from baton.runtime.memory.freed_memory import KEPT_BYTES, HeapSize, trim_heap_forever
from tests.unit.gateway.fakes import until

MIB = 2**20


class Heap:
    """A heap as glibc keeps it: freed memory stays resident until it is trimmed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.used_bytes = 100 * MIB
        self.freed_bytes = self.returned_bytes = 0
        self.num_checks = self.num_trims = 0

    def size(self) -> HeapSize:
        with self._lock:
            self.num_checks += 1
            return HeapSize(self.used_bytes + self.freed_bytes - self.returned_bytes, self.freed_bytes)

    def take(self, num_bytes: int) -> None:
        with self._lock:
            reused = min(num_bytes, self.freed_bytes)
            self.freed_bytes -= reused
            self.returned_bytes = max(0, self.returned_bytes - reused)
            self.used_bytes += num_bytes

    def free(self, num_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= num_bytes
            self.freed_bytes += num_bytes

    def take_and_free(self, num_bytes: int) -> None:
        """Take and free memory between two checks."""
        with self._lock:
            self.take(num_bytes)
            self.free(num_bytes)

    def trim(self) -> None:
        with self._lock:
            self.num_trims += 1
            self.returned_bytes = self.freed_bytes

    async def after_checks(self) -> int:
        """Return the number of trims after some more checks."""
        goal = self.num_checks + 6
        await until(lambda: self.num_checks >= goal)
        return self.num_trims


async def test_heap_is_trimmed_once_after_each_growth() -> None:
    heap = Heap()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freed_memory, "heap_size", heap.size)
        patch.setattr(freed_memory, "trim_heap", heap.trim)
        running = asyncio.create_task(trim_heap_forever(0.001))
        assert await heap.after_checks() == 0
        heap.take(KEPT_BYTES)
        assert await heap.after_checks() == 0
        heap.take(MIB)  # in use, so that the trim returns nothing
        assert await heap.after_checks() == 1
        heap.free(KEPT_BYTES + MIB)  # resident memory does not change
        assert await heap.after_checks() == 2
        for more in range(3):
            heap.take_and_free(KEPT_BYTES + MIB)
            assert await heap.after_checks() == 3 + more
        running.cancel()


TRIMMED = """
from baton.runtime.memory.freed_memory import heap_size, trim_heap
blocks = [bytes(4000) for _ in range(20_000)]  # too large for Python's own allocator, too small for a mapping
keep = blocks[-1]
grown = heap_size()
blocks.clear()
freed_bytes = heap_size().freed_bytes
trim_heap()
print(freed_bytes and freed_bytes - grown.freed_bytes, grown.resident_bytes - heap_size().resident_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")
def test_trim_returns_freed_memory_to_the_system() -> None:
    """A process of its own, because the heap of this one may be fragmented, and other threads use it."""
    freed_bytes, returned_bytes = map(int, subprocess.check_output([sys.executable, "-c", TRIMMED]).split())
    assert not freed_bytes or freed_bytes > 60 * MIB
    assert returned_bytes > 40 * MIB


HELD_AFTER_LARGE_PIECES = """
import sys, threading
from baton.runtime.memory.freed_memory import limit_freed_memory, resident_bytes
if sys.argv[1] == "limited":
    limit_freed_memory()
kept = []

def work():
    for _ in range(2):
        pieces = [bytearray(b"x") * 2**20 for _ in range(24)]
        kept.append(bytearray(2000))  # lies above them
        del pieces

before = resident_bytes()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print((resident_bytes() - before) // 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")
def test_large_pieces_are_returned_when_they_are_freed() -> None:
    """A process of its own, because the limit cannot be taken back."""
    command = [sys.executable, "-c", HELD_AFTER_LARGE_PIECES]
    held = {how: int(subprocess.check_output([*command, how])) for how in ("limited", "default")}
    assert held["limited"] < 8
    assert held["default"] > held["limited"] + 16, "the test has no effect"
