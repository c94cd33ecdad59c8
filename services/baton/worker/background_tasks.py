"""Tasks that a worker starts in passing: held until they end, cancelled with the worker, never failing
unseen."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.runtime.logging import get_logger

log = get_logger(__name__)


class BackgroundTasks:
    """Holds running tasks. One that fails is a bug of ours: it is logged, and `on_error` says what must come
    of it."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._running: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation repeats itself

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    async def aclose(self) -> None:
        """Cancel what still runs and wait for it."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("task_failed", task=task.get_name(), exc_info=error)
            self._on_error(error)
