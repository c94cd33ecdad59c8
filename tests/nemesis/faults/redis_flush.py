"""Removes all keys of Redis while it runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.nemesis.plan import Fault
from tests.nemesis.world import World


@asynccontextmanager
async def redis_flush(world: World, fault: Fault) -> AsyncIterator[None]:
    """Flush Redis. There is nothing to undo."""
    async with world.redis() as client:
        await client.flushall()
    yield
