"""Contract of `DecisionStore` for each implementation."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from baton.core.cluster.decision_record import Candidate, DecisionRecord
from baton.core.cluster.placement import Placement, Rejection
from baton.core.errors import Reason
from baton.core.ids import DecisionId
from baton.core.interfaces import DecisionStore
from baton.core.messages.jobs import PrefixSource
from baton.core.plain_json import to_plain
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_decision_store import OVERHEAD_BYTES, RedisDecisionStore
from baton.store.redis.redis_keys import Keys
from tests import builders
from tests.contract.stores import KINDS, open_stores, until_empty
from tests.redis_server import RunningRedis
from tests.times import LONG_LIMIT_S

pytestmark = pytest.mark.contract

LONG_S = 60.0


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[DecisionStore]:
    async with open_stores(request.param, lambda: request.getfixturevalue("redis").url) as stores:
        yield stores.decisions


def placed(request_id: bytes = b"r\x00\xff", attempt: int = 0) -> DecisionRecord:
    placement = Placement(
        decision_id=DecisionId(f"d{attempt}"),
        scheduler_id="s1",
        policy="kv_centric",
        prefill=builders.worker_ref("p0", epoch=2**64 - 1),
        decode=None,
        prefix_source=PrefixSource(worker=builders.worker_ref("p1"), num_blocks=3),
        ttft_s=0.125,
    )
    return record(request_id, attempt, placement=placement)


def record(request_id: bytes, attempt: int, **changes: Any) -> DecisionRecord:
    fields: dict[str, Any] = {
        "decision_id": DecisionId(f"d{attempt}"),
        "scheduler_id": "s1",
        "policy": "kv_centric",
        "request_id": request_id,
        "attempt": attempt,
        "query": builders.query(request_id=request_id, attempt=attempt, avoid=(builders.worker_ref(),)),
        "placement": None,
        "rejection": None,
        "candidates": (
            Candidate(worker=builders.worker_ref(), side="prefill", terms={"queue_s": 0.5, "never_s": float("inf")}),
        ),
        "num_excluded": {"no_free_blocks": 4},
    }
    return DecisionRecord(**(fields | changes))


async def test_record_is_unchanged_after_put_and_get(store: DecisionStore) -> None:
    await store.put(placed(), LONG_S)
    assert await store.get(placed().request_id) == (placed(),)


async def test_rejection_is_unchanged_after_put_and_get(store: DecisionStore) -> None:
    rejection = Rejection(
        reason=Reason.NO_WORKERS, message="no prefill worker", retry_after_s=1.5, term="workers", limit_s=2.0
    )
    refused = record(b"r", 0, rejection=rejection)
    await store.put(refused, LONG_S)
    assert await store.get(b"r") == (refused,)


async def test_records_of_a_request_are_sorted_by_attempt(store: DecisionStore) -> None:
    for attempt in (10, 2, 0):
        await store.put(placed(b"r", attempt), LONG_S)
    await store.put(placed(b"other", 1), LONG_S)
    assert await store.get(b"r") == tuple(placed(b"r", attempt) for attempt in (0, 2, 10))


async def test_second_put_of_a_record_replaces_the_first(store: DecisionStore) -> None:
    done = replace(
        placed(),
        actuals={"outcome": "finished", "ttft_s": 0.25, "legs": [{"worker_id": "p0", "pid": 7}], "tpot_s": None},
    )
    await store.put(placed(), LONG_S)
    await store.put(done, LONG_S)
    assert await store.get(placed().request_id) == (done,)


async def test_get_none_returns_the_last_request(store: DecisionStore) -> None:
    assert await store.get(None) == ()
    await store.put(placed(b"first"), LONG_S)
    await store.put(placed(b"second"), LONG_S)
    assert await store.get(None) == (placed(b"second"),)


async def test_unknown_request_has_no_records(store: DecisionStore) -> None:
    assert await store.get(b"unknown") == ()


async def test_records_expire(store: DecisionStore) -> None:
    await store.put(placed(b"brief"), 0.05)
    await until_empty(lambda: store.get(b"brief"))
    assert await store.get(None) == ()


async def test_records_in_redis_take_bounded_memory(redis: RunningRedis) -> None:
    connection, keys = RedisConnection(redis.url, timeout_s=LONG_LIMIT_S), Keys(cluster="bounded")
    try:
        size = len(json.dumps(to_plain(placed(b"r000"))))
        store = RedisDecisionStore(connection, keys, max_bytes=20 * (size + OVERHEAD_BYTES))
        for number in range(100):
            for attempt in range(2):
                await store.put(placed(b"r%03d" % number, attempt), LONG_S)
        kept = [number for number in range(100) if await store.get(b"r%03d" % number)]
        assert kept == list(range(100 - len(kept), 100)), "the newest are kept"
        assert 8 <= len(kept) <= 12
        assert len(await store.get(b"r099")) == 2
        assert len(await connection.call(lambda client: client.keys("*bounded*"))) == len(kept) + 3
    finally:
        await connection.aclose()


async def test_record_above_the_limit_is_not_kept_and_the_next_ones_are(redis: RunningRedis) -> None:
    connection, keys = RedisConnection(redis.url, timeout_s=LONG_LIMIT_S), Keys(cluster="small")
    try:
        size = len(json.dumps(to_plain(placed(b"r0"))))
        store = RedisDecisionStore(connection, keys, max_bytes=size + 2 * OVERHEAD_BYTES)
        large = record(b"large", 0, candidates=placed().candidates * 500)
        await store.put(large, LONG_S)
        assert await store.get(b"large") == ()
        await store.put(placed(b"r0"), LONG_S)
        assert await store.get(b"r0") == (placed(b"r0"),)
    finally:
        await connection.aclose()
