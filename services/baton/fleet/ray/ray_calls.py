"""How Ray is called: from one thread, one call after the other, each with a limit, and with one error for all
that can go wrong."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from baton.core.errors import BatonError

CALL_LIMIT_S = 30.0
"""Any call of Ray's but the first. None of them waits for a worker."""


class RayFailed(BatonError):
    """Ray did not start, cannot be joined, or does not answer."""


class RayCalls:
    """Calls Ray from one thread, which stays for as long as Ray's processes shall (the kernel ends them with
    the thread that started them). A daemon: a call that hangs keeps no process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    async def __call__(self, what: str, call: Callable[[], Any], limit_s: float = CALL_LIMIT_S) -> Any:
        """What `call` returns. Whatever it raises, and its silence for `limit_s`, is RayFailed."""
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(self._submit(call))
        except Exception as error:
            why = (
                f"no answer within {limit_s:g} s"
                if isinstance(error, TimeoutError) and not str(error)
                else cause(error)
            )
            raise RayFailed(f"Ray could not {what}: {why}") from error

    def close(self) -> None:
        """End after the calls that were submitted."""
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
            except BaseException as error:  # raised where the call was made
                future.set_exception(error)


def the_ray() -> Any:
    """Ray is imported where it is first needed: it takes most of a second."""
    import ray

    return ray


async def as_future(reference: Any) -> Any:
    """Await a Ray object without a thread that waits."""
    return await asyncio.wrap_future(reference.future())


def cause(error: BaseException) -> str:
    """The first line of what went wrong inside an actor, without Ray's wrapping."""
    inner = getattr(error, "cause", None) or error.__cause__ or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return lines[-1] if lines else type(inner).__name__
