"""Removes all keys of Redis while it runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.nemesis.effect import until_true
from tests.nemesis.plan import Fault
from tests.nemesis.world import World


@asynccontextmanager
async def redis_flush(world: World, fault: Fault) -> AsyncIterator[None]:
    """Flush Redis. There is nothing to undo. Raises NoEffect if no flush removes a key."""

    async def has_removed_keys() -> bool:
        async with world.redis() as client, client.pipeline(transaction=True) as pipeline:
            num_before, _, num_after = await pipeline.dbsize().flushall().dbsize().execute()
            return bool(num_before > 0 and num_after == 0)

    await until_true(has_removed_keys, "a flush of Redis removes keys")
    yield
