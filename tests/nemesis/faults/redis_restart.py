"""Kills Redis and starts it again at the same address, without its data."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.nemesis.plan import Fault
from tests.nemesis.world import World


@asynccontextmanager
async def redis_restart(world: World, fault: Fault) -> AsyncIterator[None]:
    """Kill Redis. It is empty after the scope."""
    await world.kill("redis")
    try:
        yield
    finally:
        await world.restart("redis")
