"""Calls Ray from one thread, with a timeout for each call, and turns every failure into RayFailed."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from baton.core.errors import BatonError
from baton.fleet.ray.ray_errors import root_cause

CALL_TIMEOUT_S = 30.0
"""Timeout of every Ray call except the first one. None of these calls waits for a worker."""


class RayFailed(BatonError):
    """Ray did not start, could not be joined, or does not answer."""


class RayCalls:
    """Runs all Ray calls on one thread.

    The thread lives as long as Ray's processes should, because the kernel ends them together with the thread
    that started them. It is a daemon thread, so a hanging call does not keep this process alive.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    async def __call__(self, action: str, call: Callable[[], Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Run `call` on the Ray thread and return its result.

        `action` completes the sentence "Ray could not ...". Raises RayFailed if the call raises anything or
        does not return within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._submit(call))
        except Exception as error:
            reason = (
                f"no answer within {timeout_s:g} s"
                if isinstance(error, TimeoutError) and not str(error)
                else root_cause(error)
            )
            raise RayFailed(f"Ray could not {action}: {reason}") from error

    def close(self) -> None:
        """End the thread after the calls that were already submitted."""
        self._calls.put(None)

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # re-raised in the coroutine that made the call
                future.set_exception(error)


async def wait_for_object(reference: Any) -> Any:
    """Await the value of a Ray object reference without blocking a thread."""
    return await asyncio.wrap_future(reference.future())
