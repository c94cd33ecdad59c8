"""Serializes the steps of an executor that has no thread of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StepQueue:
    """Lets one step run at a time. One more may be queued, and withdrawn until it starts."""

    def __init__(self) -> None:
        self._is_running = False
        self._next: asyncio.Future[None] | None = None
        self._next_id = 0

    @asynccontextmanager
    async def turn(self, step_id: int) -> AsyncIterator[None]:
        """Wait for the preceding step; the body of the `async with` runs the step.

        Raises CancelledError if the step was withdrawn before, and RuntimeError if another step is queued
        already.
        """
        if self._is_running:
            await self._wait(step_id)
        self._is_running = True
        try:
            yield
        finally:
            self._start_next()

    def withdraw(self, step_id: int) -> bool:
        """Cancel a queued step. Returns False if it is not queued (see `Executor.withdraw`)."""
        return self._next is not None and self._next_id == step_id and self._next.cancel()

    async def _wait(self, step_id: int) -> None:
        if self._next is not None:
            raise RuntimeError(f"step {step_id} cannot be queued: step {self._next_id} is queued already")
        self._next = started = asyncio.get_running_loop().create_future()
        self._next_id = step_id
        try:
            await started
        except asyncio.CancelledError:
            if self._next is started:
                self._next = None
            elif not started.cancelled():  # it was started at the same time: start the next one
                self._start_next()
            raise

    def _start_next(self) -> None:
        following, self._next = self._next, None
        self._is_running = following is not None and not following.cancelled()
        if following is not None and self._is_running:
            following.set_result(None)
