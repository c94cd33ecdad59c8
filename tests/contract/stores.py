"""Every implementation of `Membership`, `DecisionStore` and `CostStore`, behind one handle."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from baton.core.apis import CostStore, DecisionStore, Membership
from baton.store.connection import RedisConnection
from baton.store.costs import RedisCostStore
from baton.store.decisions import RedisDecisionStore
from baton.store.keys import Keys
from baton.store.membership import RedisMembership
from baton.store.memory import MemoryCostStore, MemoryDecisionStore, MemoryMembership

KINDS = ("memory", "redis")
_clusters = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    membership: Membership
    decisions: DecisionStore
    costs: CostStore


@asynccontextmanager
async def stores_of(kind: str, redis_url: Callable[[], str]) -> AsyncIterator[Stores]:
    if kind == "memory":
        yield Stores(membership=MemoryMembership(), decisions=MemoryDecisionStore(), costs=MemoryCostStore())
        return
    connection, keys = RedisConnection(redis_url()), Keys(cluster=f"test-{next(_clusters)}")
    try:
        yield Stores(
            membership=RedisMembership(connection, keys),
            decisions=RedisDecisionStore(connection, keys),
            costs=RedisCostStore(connection, keys),
        )
    finally:
        await connection.aclose()


async def eventually_not(ask: Callable[[], Awaitable[Sized]]) -> None:
    """Ask until the answer is empty."""
    async with asyncio.timeout(5):
        while await ask():  # noqa: ASYNC110 - nobody tells when an entry ends
            await asyncio.sleep(0.01)
