"""`baton.runtime.process.event_loop`: its clock and its timers."""

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


def test_it_runs(loop: asyncio.AbstractEventLoop) -> None:
    assert loop.run_until_complete(asyncio.sleep(0, 7)) == 7


def test_its_clock_tells_fractions_of_a_millisecond(loop: asyncio.AbstractEventLoop) -> None:
    times_us = [round(loop.time() * 1e6) for _ in range(100)]
    assert times_us == sorted(times_us)
    assert any(time_us % 1_000 for time_us in times_us)


@pytest.mark.parametrize("delay_s", [0.0, 0.0004, 0.001, 0.0011, 0.0049, 0.0105])
def test_no_timer_is_early(loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
    async def late_s(begin: bool) -> float:
        called = loop.create_future()
        due_s = loop.time() + delay_s
        if begin:
            loop.call_later(delay_s, called.set_result, None)
        else:
            loop.call_at(due_s, called.set_result, None)
        await called
        return loop.time() - due_s

    for begin in (True, False):
        assert all(loop.run_until_complete(late_s(begin)) >= 0 for _ in range(5))


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_timers_take_their_time_where_the_two_clocks_have_not_begun_together(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    """On a Mac libuv's goes on while it sleeps, and Python's does not."""
    began_s, own = time.monotonic(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: own() + off_s)
    loop.run_until_complete(asyncio.wait_for(asyncio.sleep(0.02), 10))
    assert 0.019 < own() - began_s < 5


@pytest.mark.parametrize("delay_s", [0.0, -1.0])
def test_what_is_due_runs_in_the_next_turn(loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
    async def order() -> list[str]:
        found: list[str] = []
        loop.call_later(delay_s, found.append, "due")
        loop.call_soon(found.append, "soon")
        await asyncio.sleep(0)
        return found

    assert loop.run_until_complete(order()) == ["due", "soon"]


def test_timer_may_have_an_infinite_delay(loop: asyncio.AbstractEventLoop) -> None:
    async def waited() -> None:
        async with asyncio.timeout(inf):
            await asyncio.sleep(0.001)

    loop.run_until_complete(waited())


def test_past_timer_fires_and_cancelled_timer_does_not(loop: asyncio.AbstractEventLoop) -> None:
    async def fired() -> list[str]:
        found: list[str] = []
        loop.call_at(loop.time() - 1, found.append, "past")
        loop.call_later(0.002, found.append, "cancelled").cancel()
        await asyncio.sleep(0.005)
        return found

    assert loop.run_until_complete(fired()) == ["past"]


def test_a_timeout_ends_what_takes_longer(loop: asyncio.AbstractEventLoop) -> None:
    async def waited() -> None:
        async with asyncio.timeout(0.003):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        loop.run_until_complete(waited())
