"""Stores with a real Redis that dies, hangs, loses data, is full, or contains garbage (F-27 to F-30)."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
import redis as sync_redis

from baton.core.errors import ConfigError, StoreUnavailable
from baton.core.interfaces import Member, MemberKind
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_decision_store import RedisDecisionStore
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_membership import RedisMembership
from tests.contract.test_decision_store import placed
from tests.redis_server import RunningRedis, running_redis

pytestmark = pytest.mark.integration

KEYS = Keys(cluster="faults")
WORKER = Member(kind=MemberKind.WORKER, member_id="w0", epoch=1, address="w0:1")
LONG_S = 60.0


@pytest.fixture
def server() -> Iterator[RunningRedis]:
    with running_redis() as server:
        yield server


@pytest.fixture
async def connection(server: RunningRedis) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(server.url, timeout_s=0.3)
    yield connection
    await connection.aclose()


@pytest.fixture
def membership(connection: RedisConnection) -> RedisMembership:
    return RedisMembership(connection, KEYS)


async def test_a_killed_server_is_reported_and_its_return_noticed(
    server: RunningRedis, membership: RedisMembership
) -> None:
    await membership.announce(WORKER, LONG_S)
    server.kill()
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await membership.members(MemberKind.WORKER)
    await asyncio.to_thread(server.start)
    await membership.announce(WORKER, LONG_S)
    assert await membership.members(MemberKind.WORKER) == (WORKER,)


@pytest.mark.parametrize("num_turns", range(12))
async def test_cancellation_during_a_call_ends_the_task(connection: RedisConnection, num_turns: int) -> None:
    async def for_ever() -> None:
        while True:
            await connection.ping()

    await connection.ping()
    task = asyncio.create_task(for_ever())
    for _ in range(num_turns):  # of the event loop: one of them lies between the end of a write and its notice
        await asyncio.sleep(0)
    task.cancel()
    ended, _ = await asyncio.wait((task,), timeout=10.0)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert ended


async def test_cancellation_while_a_call_fails_ends_the_task(connection: RedisConnection) -> None:
    is_asked = asyncio.Event()

    async def fail(_: object) -> None:
        is_asked.set()
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:  # as `asyncio.wait_for` does where what it waits for has just failed
            raise ConnectionError from None

    async def for_ever() -> None:
        while True:
            with suppress(StoreUnavailable):
                await connection.call(fail)

    connection._timeout_s = LONG_S
    task = asyncio.create_task(for_ever())
    await is_asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10.0)


async def test_a_hanging_server_costs_the_bound_and_no_answer_goes_to_the_wrong_question(
    server: RunningRedis, connection: RedisConnection, membership: RedisMembership
) -> None:
    decisions = RedisDecisionStore(connection, KEYS)
    await membership.announce(WORKER, LONG_S)
    await decisions.put(placed(), LONG_S)
    server.process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(5):
        asked = [membership.members(MemberKind.WORKER), decisions.get(None), decisions.put(placed(), LONG_S)] * 4
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(answer) for answer in answers} == {StoreUnavailable}
    server.process.send_signal(signal.SIGCONT)
    for _ in range(4):
        assert await membership.members(MemberKind.WORKER) == (WORKER,)
        assert await decisions.get(placed().request_id) == (placed(),)


async def test_a_call_that_is_cancelled_leaves_no_answer_for_the_next(
    server: RunningRedis, membership: RedisMembership
) -> None:
    await membership.announce(WORKER, LONG_S)
    for turns in range(20):
        call = asyncio.create_task(membership.members(MemberKind.GATEWAY))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        assert await membership.members(MemberKind.WORKER) == (WORKER,)
        await asyncio.gather(call, return_exceptions=True)


async def test_what_a_flush_took_the_next_announcement_brings_back(
    server: RunningRedis, membership: RedisMembership
) -> None:
    await membership.announce(WORKER, LONG_S)
    with sync_redis.Redis.from_url(server.url) as client:
        client.flushall()
    assert await membership.members(MemberKind.WORKER) == ()
    await membership.announce(WORKER, LONG_S)
    assert await membership.members(MemberKind.WORKER) == (WORKER,)


async def test_a_full_server_refuses_and_forgets_nothing(
    server: RunningRedis, connection: RedisConnection, membership: RedisMembership
) -> None:
    await membership.announce(WORKER, LONG_S)
    with sync_redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
    with pytest.raises(StoreUnavailable, match=r"OOM|maxmemory"):
        await RedisDecisionStore(connection, KEYS).put(placed(), LONG_S)
    assert await membership.members(MemberKind.WORKER) == (WORKER,)


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"kind": "gateway", "member_id": "x"}', b"null"]
)
async def test_nonsense_in_the_store_is_skipped(
    server: RunningRedis, connection: RedisConnection, membership: RedisMembership, value: bytes
) -> None:
    decisions = RedisDecisionStore(connection, KEYS)
    await membership.announce(WORKER, LONG_S)
    await decisions.put(placed(attempt=1), LONG_S)
    with sync_redis.Redis.from_url(server.url) as client:
        client.hset(KEYS.member(MemberKind.WORKER, "bad"), "value", value)
        client.sadd(KEYS.members(MemberKind.WORKER), "bad", b"\xff")
        client.hset(KEYS.decisions(placed().request_id), "7", value)
    assert await membership.members(MemberKind.WORKER) == (WORKER,)
    assert await decisions.get(placed().request_id) == (placed(attempt=1),)
    with sync_redis.Redis.from_url(server.url) as client:
        client.set(KEYS.last_decision, value)
    assert await decisions.get(None) == ()


async def test_a_key_of_another_kind_is_an_error_of_the_store(
    server: RunningRedis, membership: RedisMembership
) -> None:
    with sync_redis.Redis.from_url(server.url) as client:
        client.set(KEYS.members(MemberKind.WORKER), "mine")
    with pytest.raises(StoreUnavailable):
        await membership.members(MemberKind.WORKER)


async def test_clusters_on_one_server_do_not_meet(connection: RedisConnection, membership: RedisMembership) -> None:
    await membership.announce(WORKER, LONG_S)
    assert await RedisMembership(connection, Keys(cluster="other")).members(MemberKind.WORKER) == ()


async def test_the_error_of_an_unreachable_server_has_no_password() -> None:
    connection = RedisConnection("redis://:hunter2@127.0.0.1:9/0", timeout_s=0.5)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9") as error:
        await connection.ping()
    assert "hunter2" not in str(error.value)
    await connection.aclose()


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="redis://"):
        RedisConnection("http://somewhere")
