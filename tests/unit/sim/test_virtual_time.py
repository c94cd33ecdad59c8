"""The clock jumps, timers keep their order, and a run that can never end says so."""

import asyncio
import random
import time
from collections.abc import Coroutine
from contextvars import copy_context
from typing import Any

import pytest

from baton.sim import virtual_time
from baton.sim.virtual_time import PROCESS, ProcessClock, running_loop


def start(process: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Run a coroutine as part of a simulated process."""
    context = copy_context()
    context.run(PROCESS.set, process)
    return asyncio.get_running_loop().create_task(work, context=context)


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


@pytest.mark.parametrize("num_tasks", [3, 40])
def test_tasks_of_a_group_are_cancelled_in_the_same_order_in_each_run(num_tasks: int) -> None:
    """A set of objects has the order of their addresses, which memory that is in use changes."""

    async def main() -> list[int]:
        ended: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.sleep(60.0)
            finally:
                ended.append(number)

        async def fail() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(num_tasks):
                    occupied.append([bytearray(random.randrange(1, 2000)) for _ in range(random.randrange(9))])
                    group.create_task(wait(number))
                await asyncio.sleep(1.0)
                raise ValueError("ends the group")

        with pytest.raises(ExceptionGroup):
            await fail()
        return ended

    occupied: list[list[bytearray]] = []
    orders = {tuple(virtual_time.run(main())) for _ in range(20)}
    assert len(orders) == 1


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


def test_paused_process_stands_still_and_then_catches_up_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        events: list[tuple[str, float]] = []
        queue: asyncio.Queue[str] = asyncio.Queue()

        async def tick() -> None:
            for _ in range(3):
                await asyncio.sleep(1.0)
                events.append(("tick", round(running_loop().now_s, 3)))

        async def receive() -> None:
            while True:
                events.append((await queue.get(), round(running_loop().now_s, 3)))

        ticks, receiver = start("a", tick()), start("a", receive())
        await asyncio.sleep(1.5)
        running_loop().pause("a")
        queue.put_nowait("first")
        await asyncio.sleep(5.0)
        queue.put_nowait("second")
        assert running_loop().is_paused("a")
        assert events == [("tick", 1.0)]
        running_loop().resume("a")
        await ticks
        receiver.cancel()
        return events

    assert virtual_time.run(main()) == [
        ("tick", 1.0),
        ("first", 6.5),
        ("second", 6.5),
        ("tick", 6.5),
        ("tick", 7.5),
    ]


def test_pause_affects_no_other_process_and_no_cancelled_timer() -> None:
    async def main() -> None:
        sleeper = start("a", asyncio.sleep(1.0))
        timeout = start("a", asyncio.sleep(2.0))
        await asyncio.sleep(0.5)
        running_loop().pause("a")
        other = start("b", asyncio.sleep(3.0))
        timeout.cancel()
        await other
        assert not sleeper.done()
        assert not timeout.done()
        running_loop().resume("a")
        await asyncio.sleep(0.001)
        assert sleeper.done()
        assert timeout.cancelled()

    virtual_time.run(main())


def test_failure_is_not_hidden_by_a_process_that_is_paused() -> None:
    async def main() -> None:
        sleeper = start("a", asyncio.sleep(1.0))
        await asyncio.sleep(0.5)
        running_loop().pause("a")
        assert sleeper.done()

    with pytest.raises(AssertionError, match="done"):
        virtual_time.run(main())


def test_process_has_its_own_clock() -> None:
    async def main() -> None:
        running_loop().set_clock("a", ProcessClock(base_s=1_000.0, rate=2.0))

        async def measure() -> tuple[float, float]:
            loop = asyncio.get_running_loop()
            before_s = loop.time()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout_at(before_s + 4.0):
                    await asyncio.Event().wait()
            return before_s, loop.time()

        before_s, after_s = await start("a", measure())
        assert before_s == pytest.approx(1_000.0, abs=0.01)
        assert after_s - before_s == pytest.approx(4.0, abs=1e-6)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=1e-6), "a runs twice as fast"

    virtual_time.run(main())


def test_timers_fire_early_after_a_jump_of_the_clock() -> None:
    async def main() -> None:
        sleeper = start("a", asyncio.sleep(10.0))
        await asyncio.sleep(1.0)
        running_loop().jump_clock("a", 6.0)
        await sleeper
        assert asyncio.get_running_loop().time() == pytest.approx(4.0)

    virtual_time.run(main())


def test_clock_of_a_paused_process_jumps_too() -> None:
    async def main() -> None:
        sleeper = start("a", asyncio.sleep(10.0))
        await asyncio.sleep(1.0)
        running_loop().pause("a")
        running_loop().jump_clock("a", 6.0)
        await asyncio.sleep(1.0)
        running_loop().resume("a")
        await sleeper
        assert asyncio.get_running_loop().time() == pytest.approx(4.0)

    virtual_time.run(main())
