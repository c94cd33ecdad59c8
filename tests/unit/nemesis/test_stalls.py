"""The stall monitor records when the event loop did not run, and nothing else."""

import asyncio
import time

from tests.nemesis.stalls import StallMonitor


async def test_blocked_event_loop_is_recorded_as_a_stall() -> None:
    loop = asyncio.get_running_loop()
    monitor = StallMonitor(loop.time)
    running = asyncio.create_task(monitor.run())
    await asyncio.sleep(0)
    begin_s = loop.time()
    time.sleep(0.5)  # noqa: ASYNC251
    end_s = loop.time()
    await asyncio.sleep(0.01)
    running.cancel()
    assert any(stall.begin_s < begin_s + 0.2 and stall.end_s >= end_s for stall in monitor.stalls)


def test_timer_that_fires_in_time_is_no_stall() -> None:
    monitor = StallMonitor(lambda: 0.0)
    monitor.add(1.0, 1.01)
    assert monitor.stalls == []
