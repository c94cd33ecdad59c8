"""The clock that stands still while the event loop is stalled."""

import asyncio
import time

import pytest

from baton.runtime.process.awake_clock import MAX_TICK_S, TICK_S, AwakeClock
from baton.runtime.process.process import Background


async def test_stall_does_not_count_and_is_reported() -> None:
    loop = asyncio.get_running_loop()
    clock = AwakeClock(loop.time)
    seen: list[tuple[float, float]] = []
    async with Background(clock.run(lambda lag_s, stall_s: seen.append((lag_s, stall_s)))):
        await asyncio.sleep(2.5 * TICK_S)
        began_s, began_awake_s = loop.time(), clock()
        time.sleep(5 * MAX_TICK_S)  # noqa: ASYNC251 - blocks the loop on purpose
        assert clock() - began_awake_s <= MAX_TICK_S
        await asyncio.sleep(2 * TICK_S)
        passed_s, awake_s = loop.time() - began_s, clock() - began_awake_s
    stalls = [stall_s for _, stall_s in seen if stall_s]
    assert sum(stalls) == pytest.approx(passed_s - awake_s, abs=1e-3)
    assert max(stalls) >= 5 * MAX_TICK_S - MAX_TICK_S
    assert all(lag_s >= 0 for lag_s, _ in seen)


async def test_clock_follows_the_loop_until_it_runs() -> None:
    now_s = 10.0
    clock = AwakeClock(lambda: now_s)
    began_s = clock()
    now_s = 110.0
    assert clock() - began_s == 100.0
