"""Stores with a real Redis that dies, hangs, loses data, is full or has invalid data (F-27 to F-30)."""

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
    connection = RedisConnection(server.url, timeout_s=LONG_S)
    yield connection
    await connection.aclose()


@pytest.fixture
def membership(connection: RedisConnection) -> RedisMembership:
    return RedisMembership(connection, KEYS)


@pytest.mark.fault("F-27")
async def test_killed_server_raises_until_it_is_restarted(server: RunningRedis, membership: RedisMembership) -> None:
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
    async def ping_repeatedly() -> None:
        while True:
            await connection.ping()

    await connection.ping()
    task = asyncio.create_task(ping_repeatedly())
    for _ in range(num_turns):  # one of the turns lies between the end of a write and its callback
        await asyncio.sleep(0)
    task.cancel()
    ended, _ = await asyncio.wait((task,), timeout=30.0)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert ended


async def test_cancellation_while_a_call_fails_ends_the_task(connection: RedisConnection) -> None:
    has_started = asyncio.Event()

    async def fail(_: object) -> None:
        has_started.set()
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:  # as in `asyncio.wait_for` if the awaited call has just failed
            raise ConnectionError from None

    async def ping_repeatedly() -> None:
        while True:
            with suppress(StoreUnavailable):
                await connection.call(fail)

    task = asyncio.create_task(ping_repeatedly())
    await has_started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30.0)


@pytest.mark.fault("F-28")
async def test_calls_to_a_hanging_server_time_out_and_later_calls_get_their_own_reply(
    server: RunningRedis, connection: RedisConnection, membership: RedisMembership
) -> None:
    decisions = RedisDecisionStore(connection, KEYS)
    await membership.announce(WORKER, LONG_S)
    await decisions.put(placed(), LONG_S)
    server.process.send_signal(signal.SIGSTOP)
    connection._timeout_s = 0.3
    async with asyncio.timeout(30):
        calls = [membership.members(MemberKind.WORKER), decisions.get(None), decisions.put(placed(), LONG_S)] * 4
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(answer) for answer in answers} == {StoreUnavailable}
    server.process.send_signal(signal.SIGCONT)
    connection._timeout_s = LONG_S
    for _ in range(4):
        assert await membership.members(MemberKind.WORKER) == (WORKER,)
        assert await decisions.get(placed().request_id) == (placed(),)


async def test_reply_of_a_cancelled_call_is_not_given_to_the_next_call(
    server: RunningRedis, membership: RedisMembership
) -> None:
    await membership.announce(WORKER, LONG_S)
    for num_turns in range(20):
        call = asyncio.create_task(membership.members(MemberKind.GATEWAY))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        call.cancel()
        assert await membership.members(MemberKind.WORKER) == (WORKER,)
        await asyncio.gather(call, return_exceptions=True)


@pytest.mark.fault("F-29")
async def test_member_lost_in_a_flush_is_listed_after_its_next_announcement(
    server: RunningRedis, membership: RedisMembership
) -> None:
    await membership.announce(WORKER, LONG_S)
    with sync_redis.Redis.from_url(server.url) as client:
        client.flushall()
    assert await membership.members(MemberKind.WORKER) == ()
    await membership.announce(WORKER, LONG_S)
    assert await membership.members(MemberKind.WORKER) == (WORKER,)


@pytest.mark.fault("F-29")
async def test_full_server_refuses_writes_and_keeps_its_data(
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
async def test_invalid_values_in_redis_are_skipped(
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


async def test_key_of_another_redis_type_raises_store_unavailable(
    server: RunningRedis, membership: RedisMembership
) -> None:
    with sync_redis.Redis.from_url(server.url) as client:
        client.set(KEYS.members(MemberKind.WORKER), "a string")
    with pytest.raises(StoreUnavailable):
        await membership.members(MemberKind.WORKER)


async def test_clusters_on_one_server_do_not_see_each_other(
    connection: RedisConnection, membership: RedisMembership
) -> None:
    await membership.announce(WORKER, LONG_S)
    assert await RedisMembership(connection, Keys(cluster="other")).members(MemberKind.WORKER) == ()


async def test_error_about_an_unreachable_server_hides_the_password() -> None:
    connection = RedisConnection("redis://:hunter2@127.0.0.1:9/0", timeout_s=0.5)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9") as error:
        await connection.ping()
    assert "hunter2" not in str(error.value)
    await connection.aclose()


def test_url_with_another_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="redis://"):
        RedisConnection("http://somewhere")
