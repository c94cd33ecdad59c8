"""Clock and timers of the event loop of `baton.runtime.process.event_loop`."""

import asyncio
import time
from collections.abc import Iterator
from math import inf

import pytest

from baton.runtime.process.event_loop import new_event_loop


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = new_event_loop()
    yield loop
    loop.close()


def test_loop_runs_a_coroutine(loop: asyncio.AbstractEventLoop) -> None:
    assert loop.run_until_complete(asyncio.sleep(0, 7)) == 7


def test_clock_has_sub_millisecond_resolution(loop: asyncio.AbstractEventLoop) -> None:
    times_us = [round(loop.time() * 1e6) for _ in range(100)]
    assert times_us == sorted(times_us)
    assert any(time_us % 1_000 for time_us in times_us)


@pytest.mark.parametrize("delay_s", [0.0, 0.0004, 0.001, 0.0011, 0.0049, 0.0105])
def test_timers_do_not_fire_early(loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
    async def late_s(relative: bool) -> float:
        called = loop.create_future()
        due_s = loop.time() + delay_s
        if relative:
            loop.call_later(delay_s, called.set_result, None)
        else:
            loop.call_at(due_s, called.set_result, None)
        await called
        return loop.time() - due_s

    for relative in (True, False):
        assert all(loop.run_until_complete(late_s(relative)) >= 0 for _ in range(5))


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_timers_are_correct_if_libuv_and_python_clocks_have_an_offset(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    """On macOS, libuv's clock advances while the machine sleeps and Python's does not."""
    start_s, monotonic = time.monotonic(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + off_s)
    loop.run_until_complete(asyncio.wait_for(asyncio.sleep(0.02), 60))
    assert 0.019 < monotonic() - start_s < 60


@pytest.mark.parametrize("delay_s", [0.0, -1.0])
def test_due_timer_runs_in_the_next_iteration(loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
    async def run_order() -> list[str]:
        order: list[str] = []
        loop.call_later(delay_s, order.append, "due")
        loop.call_soon(order.append, "soon")
        await asyncio.sleep(0)
        return order

    assert loop.run_until_complete(run_order()) == ["due", "soon"]


def test_infinite_timeout_does_not_raise(loop: asyncio.AbstractEventLoop) -> None:
    async def waited() -> None:
        async with asyncio.timeout(inf):
            await asyncio.sleep(0.001)

    loop.run_until_complete(waited())


def test_past_timer_fires_and_cancelled_timer_does_not(loop: asyncio.AbstractEventLoop) -> None:
    async def fired_timers() -> list[str]:
        order: list[str] = []
        loop.call_at(loop.time() - 1, order.append, "past")
        loop.call_later(0.002, order.append, "cancelled").cancel()
        await asyncio.sleep(0.005)
        return order

    assert loop.run_until_complete(fired_timers()) == ["past"]


def test_timeout_cancels_a_longer_wait(loop: asyncio.AbstractEventLoop) -> None:
    async def waited() -> None:
        async with asyncio.timeout(0.003):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        loop.run_until_complete(waited())
