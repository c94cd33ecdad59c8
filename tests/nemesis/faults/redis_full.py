"""Fills the memory of Redis: every write is refused, reads go on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.nemesis.plan import Fault
from tests.nemesis.world import World


@asynccontextmanager
async def redis_full(world: World, fault: Fault) -> AsyncIterator[None]:
    """Lower the memory limit of Redis below what it uses."""
    async with world.redis() as client:
        limit = (await client.config_get("maxmemory"))["maxmemory"]
        await client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            await client.config_set("maxmemory", limit)
