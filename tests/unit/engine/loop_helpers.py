"""Helpers that run an engine loop over a fake device."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.core.errors import Code, Failure, Reason
from baton.engine.loop import EngineLoop
from tests.engine_rig import EngineRig

FAILURE = Failure(code=Code.INTERNAL, reason=Reason.TRANSFER_FAILED, message="injected")


def make_loop(rig: EngineRig) -> EngineLoop:
    return EngineLoop(rig.engine, rig.executor, rig.note)


@asynccontextmanager
async def running(loop: EngineLoop) -> AsyncIterator[None]:
    """Run the loop during the `async with` body, then drain it. Exceptions of the loop are raised."""
    task = asyncio.create_task(loop.run())
    try:
        yield
        loop.drain()
        await asyncio.wait_for(task, 10)
    finally:
        task.cancel()


async def turns(count: int = 20) -> None:
    """Let other tasks run for `count` turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)
