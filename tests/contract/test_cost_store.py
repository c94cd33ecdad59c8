"""Contract of `CostStore` for each implementation, and faults of Redis."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from baton.core.errors import StoreUnavailable
from baton.core.interfaces import CostStore
from baton.core.step_cost import COSTS_VERSION, StepCostModel
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_cost_store import RedisCostStore
from baton.store.redis.redis_keys import Keys
from tests.contract.stores import KINDS, open_stores, until_empty
from tests.redis_server import RunningRedis
from tests.times import LONG_LIMIT_S

pytestmark = pytest.mark.contract

LONG_S = 60.0
COSTS = StepCostModel(
    step_s=0.004,
    prefill_token_s=1e-4,
    prefill_attended_s=0.1 + 0.2,  # has no short decimal form
    decode_seq_s=2e-4,
    decode_context_s=5e-324,
    prefill_factor=1.25,
    mixed_factor=1 / 3,
    num_measured=7,
)


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[CostStore]:
    async with open_stores(request.param, lambda: request.getfixturevalue("redis").url) as stores:
        yield stores.costs


async def test_costs_are_unchanged_after_put_and_get(store: CostStore) -> None:
    await store.put("a", COSTS, LONG_S)
    assert await store.get("a") == COSTS


async def test_get_returns_the_last_put_of_its_key(store: CostStore) -> None:
    corrected = replace(COSTS, decode_factor=1.5)
    await store.put("a", COSTS, LONG_S)
    await store.put("b", COSTS, LONG_S)
    await store.put("a", corrected, LONG_S)
    assert (await store.get("a"), await store.get("b"), await store.get("c")) == (corrected, COSTS, None)


async def test_costs_expire(store: CostStore) -> None:
    await store.put("brief", COSTS, 0.05)

    async def unexpired() -> list[StepCostModel]:
        return [costs for costs in [await store.get("brief")] if costs is not None]

    await until_empty(unexpired)
    assert await store.get("brief") is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        "not JSON",
        "[" * 100_000,
        "[1, 2]",
        "{}",
        json.dumps(COSTS.to_plain() | {"version": COSTS_VERSION + 1}),
        json.dumps(COSTS.to_plain() | {"step_s": -1.0}),
        json.dumps(COSTS.to_plain() | {"decode_factor": "nan"}),
    ],
)
async def test_unreadable_value_in_redis_is_none(redis: RunningRedis, value: str) -> None:
    connection, keys = RedisConnection(redis.url, timeout_s=LONG_LIMIT_S), Keys(cluster="costs-test")
    async with aclosing(connection):
        await connection.call(lambda client: client.set(keys.costs("a"), value))
        assert await RedisCostStore(connection, keys).get("a") is None


async def test_unreachable_redis_raises_store_unavailable() -> None:
    connection = RedisConnection("redis://127.0.0.1:1", timeout_s=0.5)
    async with aclosing(connection):
        store = RedisCostStore(connection, Keys())
        with pytest.raises(StoreUnavailable):
            await store.get("a")
        with pytest.raises(StoreUnavailable):
            await store.put("a", COSTS, LONG_S)
