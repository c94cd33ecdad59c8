"""Measures the CPU time that callbacks of the event loop take in its own thread."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def longest_turn_s(work: Coroutine[Any, Any, T]) -> tuple[float, T]:
    """Run `work` to its end. Return (CPU seconds of the longest turn of the loop, its result)."""
    task = asyncio.create_task(work)
    longest_s = 0.0
    while not task.done():
        began_s = time.thread_time()
        await asyncio.sleep(0)  # all callbacks that are ready run
        longest_s = max(longest_s, time.thread_time() - began_s)
    return longest_s, await task
