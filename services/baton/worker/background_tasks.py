"""Tracks the background tasks of a worker: keeps a reference, cancels them at shutdown, reports failures."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from baton.runtime.logging import get_logger

log = get_logger(__name__)

T = TypeVar("T")


class BackgroundTasks:
    """Running asyncio tasks. A task that raises is logged, and its error is passed to `on_error`."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._running: dict[asyncio.Task[Any], None] = {}  # ordered, so that simulations are reproducible

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run `work` as a task until it ends or `aclose` cancels it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._on_done)
        return task

    async def aclose(self) -> None:
        """Cancel the tasks that still run and wait for them."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("task_failed", task=task.get_name(), exc_info=error)
            self._on_error(error)


class FirstFailure:
    """The first error that makes a worker unhealthy. `future` raises it; later errors are ignored."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self, error: BaseException) -> None:
        """Record `error`, unless another one was recorded before."""
        if not self.future.done():
            self.future.set_exception(error)
