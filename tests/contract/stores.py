"""Opens each implementation of `Membership`, `DecisionStore` and `CostStore`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from baton.core.interfaces import CostStore, DecisionStore, Membership
from baton.store.memory.memory_stores import MemoryCostStore, MemoryDecisionStore, MemoryMembership
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_cost_store import RedisCostStore
from baton.store.redis.redis_decision_store import RedisDecisionStore
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_membership import RedisMembership
from tests.times import LONG_LIMIT_S

KINDS = ("memory", "redis")
_clusters = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    membership: Membership
    decisions: DecisionStore
    costs: CostStore


@asynccontextmanager
async def open_stores(kind: str, redis_url: Callable[[], str]) -> AsyncIterator[Stores]:
    if kind == "memory":
        yield Stores(membership=MemoryMembership(), decisions=MemoryDecisionStore(), costs=MemoryCostStore())
        return
    connection, keys = RedisConnection(redis_url(), timeout_s=LONG_LIMIT_S), Keys(cluster=f"test-{next(_clusters)}")
    try:
        yield Stores(
            membership=RedisMembership(connection, keys),
            decisions=RedisDecisionStore(connection, keys),
            costs=RedisCostStore(connection, keys),
        )
    finally:
        await connection.aclose()


async def until_empty(read: Callable[[], Awaitable[Sized]]) -> None:
    """Wait until `read` returns an empty collection."""
    async with asyncio.timeout(30):
        while await read():  # noqa: ASYNC110 - no event reports an expiry
            await asyncio.sleep(0.01)
