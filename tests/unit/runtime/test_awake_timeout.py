"""The timeout that does not count stalls of this process."""

import asyncio

import pytest

from baton.runtime.process.awake_timeout import TimeLimit
from baton.sim import virtual_time


class Clock:
    """The event loop's clock, without what counts as a stall."""

    def __init__(self) -> None:
        self.stalled_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() - self.stalled_s


def test_time_limit_waits_for_the_rest_after_a_stall() -> None:
    async def scenario() -> None:
        loop, clock = asyncio.get_running_loop(), Clock()
        loop.call_later(0.05, lambda: setattr(clock, "stalled_s", 0.2))
        with pytest.raises(TimeoutError):
            async with TimeLimit(0.1, clock).timeout():
                await asyncio.Event().wait()
        assert loop.time() == pytest.approx(0.3)

    virtual_time.run(scenario())


async def test_answer_after_a_stall_that_is_longer_than_the_limit_is_taken() -> None:
    clock = Clock()
    async with TimeLimit(0.05, clock).timeout():
        clock.stalled_s = 10.0
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("limit", [TimeLimit(0.01), TimeLimit(0.01, lambda: asyncio.get_running_loop().time())])
async def test_without_a_stall_the_limit_is_that_of_asyncio(limit: TimeLimit) -> None:
    with pytest.raises(TimeoutError):
        async with limit.timeout():
            await asyncio.Event().wait()


async def test_other_errors_and_cancels_pass() -> None:
    clock = Clock()
    with pytest.raises(ValueError, match="other"):
        async with TimeLimit(1.0, clock).timeout():
            raise ValueError("other")

    async def waits() -> None:
        async with TimeLimit(1.0, clock).timeout():
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_limit() -> None:
    async with TimeLimit(None, Clock()).timeout():
        await asyncio.sleep(0)
