"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """All tasks wait and no timer is left, so that no task can ever continue."""


class _JumpSelector(selectors.BaseSelector):
    """A selector that never finds a ready file, and advances the clock by the timeout of each wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.now_s:.6f} s all tasks wait and no timer is left")
        self.now_s += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def close(self) -> None:
        self._keys.clear()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop with a virtual clock, which starts at 0 and advances only when no callback is ready.

    Threads, sockets and subprocesses cannot be used.
    """

    def __init__(self) -> None:
        self._jumps = _JumpSelector()
        super().__init__(self._jumps)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumps.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func!r} would run in a thread, which virtual time does not support")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine under virtual time, as `asyncio.run` does. Raises Deadlock if no task can continue."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
