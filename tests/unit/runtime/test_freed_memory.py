"""Freed memory is returned to the system when the process has grown."""

import asyncio
import sys

import pytest

from baton.runtime.process import freed_memory
from baton.runtime.process.freed_memory import KEPT_BYTES, resident_bytes, trim_heap, trim_heap_forever
from tests.unit.gateway.fakes import until

MIB = 2**20


async def test_heap_is_trimmed_while_the_process_is_above_its_lowest_size() -> None:
    sizes = iter([100, 100, 131, 133, 133, 90, 121, 123, 90])
    seen: list[int] = []
    trimmed_at: list[int] = []

    def next_size() -> int:
        seen.append(next(sizes, 90) * MIB)
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freed_memory, "resident_bytes", next_size)
        patch.setattr(freed_memory, "trim_heap", lambda: trimmed_at.append(seen[-1] // MIB))
        running = asyncio.create_task(trim_heap_forever(0.001))
        await until(lambda: len(seen) > 9)
        running.cancel()
    assert KEPT_BYTES == 32 * MIB
    assert trimmed_at == [133, 133, 123]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")
def test_trim_returns_freed_memory_to_the_system() -> None:
    blocks = [bytes(4000) for _ in range(20_000)]  # too large for Python's own allocator, too small for a mapping
    keep = blocks[-1]
    grown_bytes = resident_bytes()
    blocks.clear()
    trim_heap()
    assert grown_bytes - resident_bytes() > 40 * MIB
    assert keep
