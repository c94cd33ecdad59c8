"""The clock jumps, timers keep their order, and a run that can never end says so."""

import asyncio
import time

import pytest

from baton.sim import virtual_time


def test_an_hour_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert virtual_time.run(main()) == pytest.approx(3600)
    assert time.monotonic() - started < 60


def test_timers_fire_in_order_of_their_time() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def note(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            order.append(name)

        await asyncio.gather(note("late", 2.0), note("early", 0.5), note("middle", 1.0))
        return order

    assert virtual_time.run(main()) == ["early", "middle", "late"]


def test_timeouts_work_under_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(5)


def test_waiting_for_nothing_is_a_deadlock_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.monotonic)

    with pytest.raises(RuntimeError, match="thread"):
        virtual_time.run(main())
