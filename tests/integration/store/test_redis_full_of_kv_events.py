"""KV events leave memory for membership, and a publisher recovers from a Redis that is full (F-29)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from random import Random

import pytest
from redis import Redis

from baton.core.ids import WorkerRef
from baton.core.interfaces import Member, MemberKind
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import KvEventKind
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_kv_event_feed import RedisKvEventFeed
from baton.store.redis.redis_membership import RedisMembership
from baton.worker.reporting.kv_event_publisher import KvEventPublisher
from tests.builders import worker_ref
from tests.redis_server import running_redis
from tests.scale import sized
from tests.times import LONG_LIMIT_S

pytestmark = [pytest.mark.integration, pytest.mark.fault("F-29")]

MIB = 2**20
KEYS = Keys(cluster="full")
TTL_S = 30.0
MIN_ROUNDS = sized(12, 25)


class ChangingPool:
    """Implements `KvEventSource`. Holds `num_blocks` blocks, any number of which is replaced by new ones."""

    block_size_tokens = 16

    def __init__(self, num_blocks: int) -> None:
        self._numbers = count()
        self._held = [self._next() for _ in range(num_blocks)]
        self._changes: list[tuple[KvEventKind, BlockHash]] = []
        self.num_listings = 0

    def replace(self, number: int) -> None:
        gone, self._held = self._held[:number], self._held[number:]
        new = [self._next() for _ in range(number)]
        self._held += new
        self._changes += [(KvEventKind.EVICTED, block) for block in gone]
        self._changes += [(KvEventKind.STORED, block) for block in new]

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        taken, self._changes = self._changes, []
        return taken

    def announced_hashes(self) -> list[BlockHash]:
        self.num_listings += 1
        return list(self._held)

    def _next(self) -> BlockHash:
        return BlockHash(next(self._numbers).to_bytes(16, "big"))


class Publishing:
    """A worker's publisher with its pool, running."""

    def __init__(self, connection: RedisConnection, worker: WorkerRef, num_blocks: int, max_bytes: int | None) -> None:
        self.worker = worker
        self.pool = ChangingPool(num_blocks)
        feed = RedisKvEventFeed(connection, KEYS, max_bytes=max_bytes)
        self.publisher = KvEventPublisher(worker=worker, pool=self.pool, feed=feed, ttl_s=TTL_S, rng=Random(1))
        self.task = asyncio.create_task(self.publisher.run())

    def replace(self, number: int) -> None:
        self.pool.replace(number)
        self.publisher.wake()

    async def until_behind(self, is_behind: bool) -> None:
        async with asyncio.timeout(60.0):
            while self.publisher.is_behind is not is_behind:  # noqa: ASYNC110 - the publisher has no event for it
                await asyncio.sleep(0.01)

    async def until_memory_is_full(self, raw: Redis) -> None:
        """Lower the memory limit of Redis until the worker falls behind.

        The limit follows the used memory, because Redis frees buffers of connections at times of its own. It
        stays as it is once the worker has given back its own memory, shortly before it is behind.
        """
        num_bytes = kv_bytes(raw, [self])
        async with asyncio.timeout(60.0):
            while not self.publisher.is_behind:
                if kv_bytes(raw, [self]) > num_bytes // 2:
                    raw.config_set("maxmemory", raw.info("memory")["used_memory"] - 64 * 1024)
                self.replace(100)
                await asyncio.sleep(0.01)

    async def until_published(self, raw: Redis) -> None:
        """Wait until all changes are written."""
        async with asyncio.timeout(60.0):
            while self.pool.has_changes or self._last_seq(raw) != self.publisher.event_seq:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)

    def _last_seq(self, raw: Redis) -> int:
        ((entry_id, _),) = raw.xrevrange(KEYS.kv_events(self.worker), count=1)
        return int(entry_id.split(b"-")[0])


@asynccontextmanager
async def publishing(
    url: str, num_workers: int, num_blocks: int, max_bytes: int | None = None
) -> AsyncIterator[list[Publishing]]:
    connection = RedisConnection(url, timeout_s=LONG_LIMIT_S)
    refs = [worker_ref(f"w{number}") for number in range(num_workers)]
    workers = [Publishing(connection, ref, num_blocks, max_bytes) for ref in refs]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.task.cancel()
        await asyncio.wait([worker.task for worker in workers])
        await connection.aclose()


def kv_bytes(raw: Redis, workers: Sequence[Publishing]) -> int:
    keys = [key(each.worker) for each in workers for key in (KEYS.kv_events, KEYS.kv_snapshot)]
    return sum(raw.memory_usage(key, samples=0) or 0 for key in [*keys, KEYS.kv_sizes])


async def announce(membership: RedisMembership) -> None:
    for kind in MemberKind:
        await membership.announce(Member(kind=kind, member_id="m", epoch=1, address="m:1"), TTL_S)


async def test_announcements_succeed_while_workers_publish_more_than_fits() -> None:
    with running_redis(max_memory_bytes=32 * MIB) as server, Redis.from_url(server.url) as raw:
        async with publishing(server.url, num_workers=7, num_blocks=65_536) as workers:
            connection = RedisConnection(server.url, timeout_s=LONG_LIMIT_S)
            membership = RedisMembership(connection, KEYS)
            was_behind, largest, num_rounds = False, 0, 0
            while num_rounds < MIN_ROUNDS or (largest <= 4 * MIB and num_rounds < 250):
                num_rounds += 1
                for worker in workers:
                    worker.replace(8_192)
                await asyncio.sleep(0.1)
                await announce(membership)
                largest = max(largest, kv_bytes(raw, workers))
                was_behind = was_behind or any(worker.publisher.is_behind for worker in workers)
            assert was_behind, "the workers need more than their share"
            assert 4 * MIB < largest <= 8 * MIB

            raw.config_set("maxmemory", 256 * MIB)
            for worker in workers:
                await worker.until_behind(False)
            await announce(membership)
            await connection.aclose()


async def test_publisher_recovers_from_a_redis_that_its_own_events_filled() -> None:
    with running_redis() as server, Redis.from_url(server.url) as raw:
        async with publishing(server.url, num_workers=1, num_blocks=60_000, max_bytes=64 * MIB) as (worker,):
            await worker.until_behind(False)
            for _ in range(7):
                worker.replace(8_192)
                await worker.until_published(raw)
            assert kv_bytes(raw, [worker]) > 2 * MIB
            await worker.until_memory_is_full(raw)
            assert kv_bytes(raw, [worker]) < 100_000
            connection = RedisConnection(server.url, timeout_s=LONG_LIMIT_S)
            await announce(membership := RedisMembership(connection, KEYS))
            assert await membership.members(MemberKind.WORKER) != ()
            await worker.until_behind(False)
            await connection.aclose()


async def test_worker_builds_no_snapshots_while_redis_is_full_of_other_data() -> None:
    with running_redis() as server, Redis.from_url(server.url) as raw:
        async with publishing(server.url, num_workers=1, num_blocks=60_000, max_bytes=64 * MIB) as (worker,):
            await worker.until_behind(False)
            for number in range(640):
                raw.set(f"other:{number}", bytes(64 * 1024))
            await worker.until_memory_is_full(raw)
            connection = RedisConnection(server.url, timeout_s=LONG_LIMIT_S)
            num_listings = worker.pool.num_listings
            for _ in range(20):  # the memory that the worker gave back is left to membership
                await announce(RedisMembership(connection, KEYS))
                await asyncio.sleep(0.1)
            assert worker.publisher.is_behind
            assert worker.pool.num_listings <= num_listings + 1
            raw.delete(*(f"other:{number}" for number in range(640)))
            await worker.until_behind(False)
            await connection.aclose()
