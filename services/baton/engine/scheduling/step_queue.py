"""Steps one after the other, on a device that has no thread of its own for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StepQueue:
    """One step runs; one more may wait, and be withdrawn until its turn has come."""

    def __init__(self) -> None:
        self._is_taken = False
        self._next: asyncio.Future[None] | None = None
        self._next_id = 0

    @asynccontextmanager
    async def turn(self, step_id: int) -> AsyncIterator[None]:
        """Inside, the step runs. Raises CancelledError if it was withdrawn before."""
        if self._is_taken:
            await self._wait(step_id)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def withdraw(self, step_id: int) -> bool:
        """As `Executor.withdraw`."""
        return self._next is not None and self._next_id == step_id and self._next.cancel()

    async def _wait(self, step_id: int) -> None:
        if self._next is not None:
            raise RuntimeError("a step runs and another one waits already")
        self._next = mine = asyncio.get_running_loop().create_future()
        self._next_id = step_id
        try:
            await mine
        except asyncio.CancelledError:
            if self._next is mine:
                self._next = None
            elif not mine.cancelled():  # the turn had come
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        following, self._next = self._next, None
        self._is_taken = following is not None and not following.cancelled()
        if following is not None and self._is_taken:
            following.set_result(None)
