"""The clock that stands still while the event loop is stalled."""

import asyncio

import pytest

from baton.runtime.process.awake_clock import MAX_TICK_S, TICK_S, AwakeClock
from baton.runtime.process.process import Background
from baton.sim import virtual_time


def test_stall_does_not_count_and_is_reported() -> None:
    stalled_s = 0.0

    async def scenario() -> None:
        nonlocal stalled_s
        loop, stall_s = asyncio.get_running_loop(), 5 * MAX_TICK_S

        def now_s() -> float:
            return loop.time() + stalled_s

        clock = AwakeClock(now_s)
        seen: list[tuple[float, float]] = []
        async with Background(clock.run(lambda lag_s, stall_s: seen.append((lag_s, stall_s)))):
            await asyncio.sleep(2.5 * TICK_S)
            began_s, began_awake_s = now_s(), clock()
            stalled_s += stall_s
            assert clock() - began_awake_s <= MAX_TICK_S
            await asyncio.sleep(2 * TICK_S)
            passed_s, awake_s = now_s() - began_s, clock() - began_awake_s
        assert passed_s == pytest.approx(stall_s + 2 * TICK_S)
        assert passed_s - awake_s == pytest.approx(stall_s + TICK_S - MAX_TICK_S)
        assert [stall_s for _, stall_s in seen if stall_s > 1e-6] == [pytest.approx(passed_s - awake_s)]
        assert all(lag_s >= 0 for lag_s, _ in seen)

    virtual_time.run(scenario())


async def test_clock_follows_the_loop_until_it_runs() -> None:
    now_s = 10.0
    clock = AwakeClock(lambda: now_s)
    began_s = clock()
    now_s = 110.0
    assert clock() - began_s == 100.0
