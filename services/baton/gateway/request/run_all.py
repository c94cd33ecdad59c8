"""Several coroutines as one."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def run_all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error cancels the others and is raised as it is."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
