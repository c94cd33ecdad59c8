"""Kills processes with SIGKILL, all at the same moment, and starts them again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.nemesis.plan import Fault
from tests.nemesis.world import World


@asynccontextmanager
async def kill(world: World, fault: Fault) -> AsyncIterator[None]:
    """Kill the targets. The scope ends when all of them are ready again."""
    killed = await asyncio.gather(*(world.kill(name) for name in fault.targets), return_exceptions=True)
    try:
        for error in killed:
            if error is not None:
                raise error
        yield
    finally:
        await asyncio.gather(*(world.restart(name) for name in fault.targets))
