"""What `baton up` shows while a cluster starts: one line a phase, with its time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
Say = Callable[[str], None]

_NAME_WIDTH = 13
_TEXT_WIDTH = 60


class StartupProgress:
    """Phases run side by side; each line appears when its phase has ended."""

    def __init__(self, say: Say) -> None:
        self._say = say

    async def phase(self, name: str, work: Awaitable[T], describe: Callable[[T], str]) -> T:
        """Await one phase and say what came of it."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        result = await work
        self.line(name, describe(result), loop.time() - began_s)
        return result

    def line(self, name: str, text: str, seconds: float) -> None:
        self._say(f"{name:<{_NAME_WIDTH}}{text:<{_TEXT_WIDTH}} {seconds:5.1f} s")
