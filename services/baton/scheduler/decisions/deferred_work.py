"""Runs work that a placement does not depend on, in the next iteration of the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable


class DeferredWork:
    """Callbacks that run in order in the next iteration of the event loop.

    Call `run_pending` to run them now.

    `after_batch` is called at the end of each iteration in which something was scheduled.
    """

    def __init__(self, after_batch: Callable[[], None]) -> None:
        self._after_batch = after_batch
        self._pending: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def add(self, work: Callable[[], None]) -> None:
        """Run `work` in the next iteration of the event loop."""
        self._pending.append(work)
        self.schedule()

    def schedule(self) -> None:
        """Run an iteration soon, even if there is nothing but `after_batch`."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_batch)

    def run_pending(self) -> None:
        """Run all pending work now.

        Errors go to the event loop's exception handler, because the caller is not the one who added the work.
        """
        while self._pending:
            work = self._pending.popleft()
            try:
                work()
            except Exception as error:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "deferred work of the scheduler failed", "exception": error}
                )

    def _run_batch(self) -> None:
        self._is_scheduled = False
        self.run_pending()
        self._after_batch()
