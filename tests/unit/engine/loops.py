"""A loop over a fake device, run beside a test."""

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
    """Runs beside the test; drained at the end, and whatever it raises comes out."""
    task = asyncio.create_task(loop.run())
    try:
        yield
        loop.drain()
        await asyncio.wait_for(task, 10)
    finally:
        task.cancel()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
