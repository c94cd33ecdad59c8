"""Runs tests in virtual time: waits take no real time, and every run is the same."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from baton.sim.virtual_time import run

P = ParamSpec("P")


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in a loop whose clock jumps to the next timer."""

    @functools.wraps(test)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return wrapper
