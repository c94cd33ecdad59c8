"""Prints the phases of the start of a cluster, one line each."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
Notify = Callable[[str], None]
"""Prints one line for the user."""

_PHASE_WIDTH = 13
_TEXT_WIDTH = 60


class StartupProgress:
    """Prints one line per startup phase, with its result and its duration. Phases run concurrently."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify

    async def phase(self, name: str, work: Awaitable[T], describe: Callable[[T], str]) -> T:
        """Await one phase and print its line. `describe` turns the result into text."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        result = await work
        self.line(name, describe(result), loop.time() - began_s)
        return result

    def line(self, name: str, text: str, seconds: float) -> None:
        """Print one line."""
        self._notify(f"{name:<{_PHASE_WIDTH}}{text:<{_TEXT_WIDTH}} {seconds:5.1f} s")
