"""How a fault shows that it had an effect: each fault measures it, and raises NoEffect otherwise."""

import asyncio
from collections.abc import Awaitable, Callable

LIMIT_S = 60.0
"""Longest time until an effect must be seen. Generous, because a test machine may be busy."""
POLL_S = 0.05


class NoEffect(AssertionError):
    """A fault was injected, and what it disturbs goes on as before."""


async def until_true(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until `condition` is true. Raises NoEffect that names `what` after `LIMIT_S`."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise NoEffect(f"not within {LIMIT_S:g} s: {what}") from None
