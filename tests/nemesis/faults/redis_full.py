"""Fills the memory of Redis: every write is refused, reads go on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from tests.nemesis.effect import NoEffect
from tests.nemesis.plan import Fault
from tests.nemesis.world import World

PROBE_KEY = "nemesis:probe"


@asynccontextmanager
async def redis_full(world: World, fault: Fault) -> AsyncIterator[None]:
    """Lower the memory limit of Redis below what it uses. Raises NoEffect if a write is not refused."""
    async with world.redis() as client:
        limit = (await client.config_get("maxmemory"))["maxmemory"]
        await client.config_set("maxmemory", 1)
        try:
            if not await _refuses_writes(client):
                raise NoEffect("Redis accepts a write although its memory is full")
            yield
        finally:
            await client.config_set("maxmemory", limit)


async def _refuses_writes(client: Redis) -> bool:
    try:
        await client.set(PROBE_KEY, "", px=1)
    except OutOfMemoryError:
        return True
    return False
