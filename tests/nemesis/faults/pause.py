"""Stops processes with SIGSTOP and continues them. Their connections stay open meanwhile."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.nemesis.plan import Fault
from tests.nemesis.world import World


@asynccontextmanager
async def pause(world: World, fault: Fault) -> AsyncIterator[None]:
    """Pause the targets."""
    async with AsyncExitStack() as stack:
        for name in fault.targets:
            await stack.enter_async_context(world.paused(name))
        yield
