"""Contract of `KvEventFeed` for each implementation, and foreign entries and faults of Redis."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from itertools import count
from random import Random

import pytest
from redis import Redis

from baton.core.errors import StoreUnavailable
from baton.core.ids import WorkerRef
from baton.core.interfaces import KvEventFeed
from baton.core.kv.kv_events import MAX_EVENT_HASHES, KvEvent, KvEventKind, KvSnapshot, Tier, UnreadableEvent
from baton.engine.kv_cache.block_pool import BlockPool
from baton.prefix_index.index import PrefixIndex
from baton.scheduler.state.kv_event_reader import KvEventReader
from baton.store.kv_stream_window import event_bytes, snapshot_bytes
from baton.store.memory.memory_stores import MemoryKvEventFeed
from baton.store.redis import redis_kv_event_feed
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_kv_event_feed import HEAD, RedisKvEventFeed, decode_snapshot, encode_snapshot
from baton.worker.reporting.kv_event_publisher import KvEventPublisher
from tests.builders import worker_ref
from tests.contract.stores import KINDS
from tests.fake_executor import FakeGenerationTable
from tests.redis_server import RunningRedis, running_redis
from tests.times import LONG_LIMIT_S

pytestmark = pytest.mark.contract

LONG_S = 60.0
POLL_S = 0.01
W = worker_ref("w ä:{*}\n", epoch=2**64 - 1)
OTHER = worker_ref("w1")
_clusters = count()


@pytest.fixture(params=KINDS)
async def feed(request: pytest.FixtureRequest) -> AsyncIterator[KvEventFeed]:
    if request.param == "memory":
        yield MemoryKvEventFeed()
        return
    connection = RedisConnection(request.getfixturevalue("redis").url, timeout_s=LONG_LIMIT_S)
    yield RedisKvEventFeed(connection, Keys(cluster=f"kv-{next(_clusters)}"))
    await connection.aclose()


def hashes(number: int, seed: int = 0) -> tuple[bytes, ...]:
    """Return random bytes, most of which are not valid text."""
    rng = Random(seed)
    return tuple(rng.randbytes(16) for _ in range(number))


def event(
    event_seq: int, kind: KvEventKind = KvEventKind.STORED, worker: WorkerRef = W, tier: Tier = Tier.DEVICE
) -> KvEvent:
    held = hashes(3, event_seq) if kind is not KvEventKind.RESET else ()
    return KvEvent(worker=worker, event_seq=event_seq, kind=kind, tier=tier, hashes=held, block_size_tokens=16)


def snapshot(event_seq: int, worker: WorkerRef = W, number: int = 3) -> KvSnapshot:
    held = {Tier.DEVICE: hashes(number, event_seq), Tier.HOST: hashes(2), Tier.DISK: ()}
    return KvSnapshot(worker=worker, event_seq=event_seq, block_size_tokens=16, hashes=held)


async def test_events_are_read_unchanged_and_in_order(feed: KvEventFeed) -> None:
    events = [
        event(1),
        event(2, KvEventKind.EVICTED),
        event(3, tier=Tier.HOST),
        event(10, KvEventKind.EVICTED, tier=Tier.DISK),
    ]
    await feed.publish(W, events[:1], LONG_S)
    await feed.publish(W, events[1:], LONG_S)
    assert await feed.read({W: 0}, max_events=10, wait_s=1.0) == {W: events}
    assert await feed.read({W: 0}, max_events=2, wait_s=1.0) == {W: events[:2]}
    assert await feed.read({W: 2}, max_events=2, wait_s=1.0) == {W: events[2:]}


async def test_one_read_returns_all_workers_with_events(feed: KvEventFeed) -> None:
    other_epoch = worker_ref(W.worker_id, epoch=1)
    for worker in (W, OTHER):
        await feed.publish(worker, [event(1, worker=worker)], LONG_S)
    assert await feed.read({W: 0, OTHER: 1, other_epoch: 0}, max_events=10, wait_s=1.0) == {W: [event(1)]}
    assert set(await feed.read({W: 0, OTHER: 0}, max_events=10, wait_s=1.0)) == {W, OTHER}
    assert await feed.read({}, max_events=10, wait_s=1.0) == {}


async def test_read_waits_for_an_event_or_the_timeout(feed: KvEventFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await feed.read({W: 0}, max_events=10, wait_s=0.02) == {}
    monkeypatch.setattr(redis_kv_event_feed, "MAX_WAIT_S", 30.0)  # or the read could end before the event
    reading = asyncio.create_task(feed.read({W: 0, OTHER: 0}, max_events=10, wait_s=30.0))
    await asyncio.sleep(0.05)
    assert not reading.done()
    await feed.publish(OTHER, [event(1, worker=OTHER)], LONG_S)
    assert await reading == {OTHER: [event(1, worker=OTHER)]}


async def test_publishing_a_used_event_number_is_refused(feed: KvEventFeed) -> None:
    await feed.publish(W, [event(5)], LONG_S)
    with pytest.raises(StoreUnavailable):
        await feed.publish(W, [event(5)], LONG_S)
    await feed.publish(W, [event(6)], LONG_S)
    assert await feed.read({W: 0}, max_events=10, wait_s=1.0) == {W: [event(5), event(6)]}


async def test_new_snapshot_replaces_the_last_one(feed: KvEventFeed) -> None:
    assert await feed.snapshot(W) is None
    await feed.publish(W, [event(1)], LONG_S, snapshot(1))
    assert await feed.snapshot(W) == snapshot(1)
    await feed.publish(W, [event(2)], LONG_S)
    assert await feed.snapshot(W) == snapshot(1)
    await feed.publish(W, [], LONG_S, snapshot(2, number=0))
    assert await feed.snapshot(W) == snapshot(2, number=0)
    assert await feed.snapshot(OTHER) is None


async def test_reset_discards_all_events_of_the_stream(feed: KvEventFeed) -> None:
    await feed.publish(W, [event(1), event(2**63)], LONG_S)
    await feed.reset(snapshot(7), LONG_S)
    assert await feed.read({W: 0}, max_events=10, wait_s=1.0) == {W: [event(7, KvEventKind.RESET)]}
    assert await feed.snapshot(W) == snapshot(7)
    await feed.publish(W, [event(8)], LONG_S)
    assert await feed.read({W: 7}, max_events=10, wait_s=1.0) == {W: [event(8)]}


async def test_renew_returns_the_last_event_number_or_zero_without_a_snapshot(feed: KvEventFeed) -> None:
    assert await feed.renew(W, LONG_S) == 0
    await feed.publish(W, [event(1)], LONG_S)
    assert await feed.renew(W, LONG_S) == 0  # without a snapshot a new reader cannot start
    await feed.reset(snapshot(2), LONG_S)
    await feed.publish(W, [event(3), event(2**63)], LONG_S)
    assert await feed.renew(W, LONG_S) == 2**63


async def test_stream_that_is_not_renewed_expires(feed: KvEventFeed) -> None:
    for ttl_s in (0.05, 0.5, 5.0):  # longer ones if OTHER has expired before it could be renewed
        await feed.reset(snapshot(1, W), 2 * ttl_s)
        await feed.reset(snapshot(1, OTHER), ttl_s)
        if await feed.renew(OTHER, LONG_S):
            break
    async with asyncio.timeout(30):
        while await feed.snapshot(W) is not None:  # noqa: ASYNC110 - expiry has no event
            await asyncio.sleep(0.01)
    assert (await feed.renew(W, LONG_S), await feed.renew(OTHER, LONG_S)) == (0, 1)
    assert (await feed.snapshot(W), await feed.snapshot(OTHER)) == (None, snapshot(1, OTHER))
    assert set(await feed.read({W: 0, OTHER: 0}, max_events=10, wait_s=0.02)) == {OTHER}


@pytest.mark.parametrize("kind", KINDS)
async def test_stream_length_is_bounded(kind: str, request: pytest.FixtureRequest) -> None:
    connection = RedisConnection(request.getfixturevalue("redis").url, timeout_s=LONG_LIMIT_S)
    feed: KvEventFeed = (
        MemoryKvEventFeed(max_stream_bytes=100 * event_bytes(event(1)))
        if kind == "memory"
        else RedisKvEventFeed(connection, Keys(cluster="kv-bound"), max_stream_bytes=100 * event_bytes(event(1)))
    )
    for first in range(1, 1_001, 100):
        await feed.publish(W, [event(seq) for seq in range(first, first + 100)], LONG_S)
    kept = (await feed.read({W: 0}, max_events=2_000, wait_s=1.0))[W]
    assert 100 <= len(kept) <= 200  # Redis trims whole nodes of up to 100 entries
    assert kept[-1].event_seq == 1_000
    await connection.aclose()


async def test_stream_keeps_the_events_since_the_last_snapshot_but_one(feed: KvEventFeed) -> None:
    large = [
        KvEvent(worker=W, event_seq=seq, kind=KvEventKind.STORED, hashes=hashes(MAX_EVENT_HASHES), block_size_tokens=16)
        for seq in range(1, 31)
    ]
    await feed.publish(W, large[:10], LONG_S, snapshot(10))
    await feed.publish(W, large[10:20], LONG_S, snapshot(20))
    await feed.publish(W, [], LONG_S, snapshot(20))  # the same one again, as a scheduler may request
    kept = (await feed.read({W: 0}, max_events=100, wait_s=1.0))[W]
    assert kept[0].event_seq in (10, 11)  # Redis trims whole nodes
    assert kept[-10:] == large[10:20]
    await feed.publish(W, large[20:], LONG_S, snapshot(30))
    kept = (await feed.read({W: 0}, max_events=100, wait_s=1.0))[W]
    assert kept[0].event_seq in (20, 21)
    assert kept[-10:] == large[20:]
    assert await feed.renew(W, LONG_S) == 30


async def test_last_event_is_kept_after_snapshots_without_events(feed: KvEventFeed) -> None:
    await feed.reset(snapshot(1), LONG_S)
    await feed.publish(W, [event(2)], LONG_S, snapshot(2))
    await feed.publish(W, [], LONG_S, snapshot(2))
    assert await feed.renew(W, LONG_S) == 2
    assert (await feed.read({W: 1}, max_events=10, wait_s=1.0)) == {W: [event(2)]}


# Redis only


@pytest.mark.parametrize("num_hashes", [0, 1, 20, 300, MAX_EVENT_HASHES])
async def test_counted_size_covers_the_memory_that_redis_uses(redis: RunningRedis, num_hashes: int) -> None:
    connection, keys = RedisConnection(redis.url, timeout_s=LONG_LIMIT_S), Keys(cluster=f"kv-{next(_clusters)}")
    feed = RedisKvEventFeed(connection, keys)
    await feed.reset(snapshot(1, number=1_000), LONG_S)
    for first in range(2, 2_002, 50):
        events = [
            KvEvent(
                worker=W,
                event_seq=2**62 + seq,
                kind=KvEventKind.EVICTED,
                hashes=hashes(num_hashes),
                block_size_tokens=16,
            )
            for seq in range(first, first + 50)
        ]
        await feed.publish(W, events, LONG_S)
    with Redis.from_url(redis.url) as raw:
        used = sum(raw.memory_usage(key(W), samples=0) for key in (keys.kv_events, keys.kv_snapshot))
        sizes = raw.hgetall(keys.kv_sizes)
        assert raw.pttl(keys.kv_sizes) > 0
    assert used <= int(sizes[b":total"]) <= 1.5 * used + 2_000 * 200 + 50_000
    assert set(sizes.values()) == {sizes[b":total"]}
    await connection.aclose()


async def test_total_of_all_workers_is_bounded_and_ended_workers_go_first(redis: RunningRedis) -> None:
    connection, keys = RedisConnection(redis.url, timeout_s=LONG_LIMIT_S), Keys(cluster=f"kv-{next(_clusters)}")
    size = snapshot_bytes(snapshot(1, number=50_000)) + 30_000
    feed = RedisKvEventFeed(connection, keys, max_bytes=3 * size)
    workers = [worker_ref(f"w{number}") for number in range(4)]
    for worker in workers[:3]:
        await feed.reset(snapshot(1, worker, number=50_000), LONG_S)
    with pytest.raises(StoreUnavailable, match="KV events would take"):
        await feed.reset(snapshot(1, workers[3], number=50_000), LONG_S)
    with pytest.raises(StoreUnavailable, match="lacks"):
        await feed.renew(workers[3], LONG_S)
    assert [await feed.renew(worker, LONG_S) for worker in workers[:3]] == [1, 1, 1]
    with Redis.from_url(redis.url) as raw:
        raw.pexpire(keys.kv_events(workers[0]), 14_000)  # as if it had ended 46 s ago
        raw.hset(keys.kv_sizes, ":looked", int(raw.time()[0]) - 1)  # it is searched again after a second
    assert await feed.renew(workers[3], LONG_S) == 0
    await feed.reset(snapshot(1, workers[3], number=50_000), LONG_S)
    assert [await feed.renew(worker, LONG_S) for worker in workers] == [0, 1, 1, 1]
    with Redis.from_url(redis.url) as raw:
        assert raw.exists(keys.kv_snapshot(workers[0])) == 0
        assert len(raw.hgetall(keys.kv_sizes)) == 5
        raw.delete(keys.kv_sizes)
    assert await feed.renew(workers[3], LONG_S) == 0, "a stream that is not counted is written again"
    await connection.aclose()


async def test_refused_event_leaves_a_stream_that_a_reset_replaces(redis: RunningRedis) -> None:
    connection, keys = RedisConnection(redis.url, timeout_s=LONG_LIMIT_S), Keys(cluster=f"kv-{next(_clusters)}")
    feed = RedisKvEventFeed(connection, keys, max_bytes=100_000)
    await feed.reset(snapshot(1, number=2_000), LONG_S)
    with pytest.raises(StoreUnavailable, match="maxmemory"):  # noqa: PT012 - the call that is refused varies
        for seq in range(2, 1_000):
            await feed.publish(W, [event(seq)], LONG_S)
    assert await feed.renew(W, LONG_S) > 1
    await feed.reset(snapshot(2_000, number=2_000), LONG_S)
    assert await feed.renew(W, LONG_S) == 2_000
    await connection.aclose()


@pytest.mark.parametrize(
    ("fields", "is_from_later_release"),
    [
        ({"k": "stored", "t": "device", "s": "16", "h": b"x" * 17}, False),
        ({"k": "stored", "t": "device", "s": "16", "h": b"x" * 16 * (MAX_EVENT_HASHES + 1)}, False),
        ({"k": "stored", "t": "device", "s": "many", "h": b""}, False),
        ({"k": b"\xff\xfe", "t": "device", "s": "16", "h": b""}, False),
        ({"something": "else"}, False),
        ({"k": "cloned", "t": "device", "s": "16", "h": b"x" * 16}, True),
        ({"k": "stored", "t": "tape", "s": "16", "h": b"x" * 16, "new": "field"}, True),
    ],
)
async def test_unreadable_entry_is_reported_with_its_number(
    redis: RunningRedis, fields: dict[str, object], is_from_later_release: bool
) -> None:
    connection, keys = RedisConnection(redis.url, timeout_s=LONG_LIMIT_S), Keys(cluster=f"kv-{next(_clusters)}")
    feed = RedisKvEventFeed(connection, keys)
    await feed.publish(W, [event(1)], LONG_S)
    with Redis.from_url(redis.url) as raw:
        raw.xadd(keys.kv_events(W), fields, id="2-0")  # type: ignore[arg-type]
    await feed.publish(W, [event(3)], LONG_S)
    first, unreadable, last = (await feed.read({W: 0}, max_events=10, wait_s=1.0))[W]
    assert (first, last) == (event(1), event(3))
    assert isinstance(unreadable, UnreadableEvent)
    assert (unreadable.event_seq, unreadable.is_from_later_release) == (2, is_from_later_release)
    await connection.aclose()


async def test_unreadable_snapshot_is_none(redis: RunningRedis) -> None:
    connection, keys = RedisConnection(redis.url, timeout_s=LONG_LIMIT_S), Keys(cluster=f"kv-{next(_clusters)}")
    with Redis.from_url(redis.url) as raw:
        raw.set(keys.kv_snapshot(W), b"\xff\x00 invalid")
    assert await RedisKvEventFeed(connection, keys).snapshot(W) is None
    await connection.aclose()


async def test_keys_of_another_redis_type_raise_until_a_reset(redis: RunningRedis) -> None:
    connection, keys = RedisConnection(redis.url, timeout_s=LONG_LIMIT_S), Keys(cluster=f"kv-{next(_clusters)}")
    feed = RedisKvEventFeed(connection, keys)
    with Redis.from_url(redis.url) as raw:
        raw.set(keys.kv_events(W), "a string")
        raw.lpush(keys.kv_snapshot(W), "a list")
    assert await feed.renew(W, LONG_S) == 0
    with pytest.raises(StoreUnavailable):
        await feed.publish(W, [event(1)], LONG_S)
    await feed.reset(snapshot(2), LONG_S)  # replaces the keys
    assert await feed.renew(W, LONG_S) == 2
    await connection.aclose()


def test_truncated_snapshots_are_refused_and_unknown_tiers_skipped() -> None:
    encoded = snapshot(7)
    value = encode_snapshot(encoded)
    assert decode_snapshot(W, value) == encoded
    assert len(value) < 16 * 5 + 40
    for cut in range(len(value)):
        with pytest.raises(ValueError):  # noqa: PT011 - any message
            decode_snapshot(W, value[:cut])
    with pytest.raises(ValueError, match="bytes too long"):
        decode_snapshot(W, value + b"x")
    from_later_release = (
        value[: HEAD.size - 1] + bytes([4]) + value[HEAD.size :] + bytes([9]) + (1).to_bytes(4, "little") + bytes(16)
    )
    assert decode_snapshot(W, from_later_release) == encoded


class FeedUnderFaults:
    """A worker's publisher and a scheduler's reader of its events, with one Redis connection each.

    raw: a further client of the same server
    """

    def __init__(self, url: str, raw: Redis) -> None:
        self._raw = raw
        self.connections = [RedisConnection(url) for _ in range(2)]
        published, read = (RedisKvEventFeed(connection, Keys(cluster="kv-feed")) for connection in self.connections)
        self.pool = BlockPool(64, 4, FakeGenerationTable(64))
        self.publisher = KvEventPublisher(worker=W, pool=self.pool, feed=published, ttl_s=LONG_S, rng=Random(1))
        self.degraded: list[bool] = []
        self.tasks = [asyncio.create_task(self.publisher.run())]
        self._read = read
        self._start_reader()

    def _start_reader(self) -> None:
        self.index = PrefixIndex()
        self.reader = KvEventReader(
            feed=self._read,
            index=self.index,
            request_snapshot=lambda worker: self.publisher.request_snapshot(),
            on_degraded=self.degraded.append,
            rng=Random(2),
        )
        self.reader.follow(W, 64)
        self.tasks.append(asyncio.create_task(self.reader.run()))

    def restart_reader(self) -> None:
        """Start a reader with an empty index, as a new scheduler does, instead of the running one."""
        self.tasks.pop().cancel()
        self._start_reader()

    def store(self, *blocks: bytes) -> None:
        ids = self.pool.allocate(len(blocks))
        assert ids is not None
        for block_id, block_hash in zip(ids, blocks, strict=True):
            self.pool.set_hash(block_id, block_hash)
        self.pool.unref(ids)
        self.publisher.wake()

    async def until_consistent(self, within_s: float) -> None:
        """Wait until the index holds exactly the blocks of the pool.

        Time in which this process or Redis stands still does not count.
        """
        for _ in range(round(within_s / POLL_S)):
            if self._is_consistent():
                return
            await asyncio.sleep(POLL_S)
            self._raw.ping()
        raise AssertionError(f"the index is not consistent after {within_s} s")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - index, reader and publisher have no event for it
                await asyncio.sleep(POLL_S)

    def check_degraded(self, *, is_degraded: bool) -> None:
        """Check that each change was reported once, and the last one. A busy machine may have caused more."""
        assert self.degraded == [number % 2 == 0 for number in range(len(self.degraded))]
        assert self.degraded[-1] is is_degraded

    def _is_consistent(self) -> bool:
        held = self.pool.hashes()
        return self.index.num_held(W) == len(held) and all(self.index.overlaps([block], 0.0) for block in held)

    async def aclose(self) -> None:
        for task in self.tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.wait(self.tasks)
        for connection in self.connections:
            await connection.aclose()


@pytest.mark.integration
@pytest.mark.fault("F-29")
@pytest.mark.parametrize("is_reader_new", [False, True])
async def test_index_is_consistent_after_redis_restarts_with_old_data(is_reader_new: bool) -> None:
    """Between the old data and the restart, blocks were evicted and others stored."""
    blocks = iter(hashes(64))
    with running_redis() as server, Redis.from_url(server.url) as raw:
        feed = FeedUnderFaults(server.url, raw)
        feed.store(*(next(blocks) for _ in range(8)))
        await feed.until_consistent(5.0)
        await feed.until(lambda: bool(raw.keys("*")))
        old = {name: raw.dump(name) for name in raw.keys("*")}

        taken = feed.pool.allocate(60)  # evicts
        assert taken is not None
        feed.pool.unref(taken)
        feed.store(*(next(blocks) for _ in range(4)))
        await feed.until_consistent(5.0)

        raw.flushall()
        for name, value in old.items():
            raw.restore(name, 0, value, replace=True)  # a write may have been under way
        if is_reader_new:
            feed.restart_reader()
        feed.store(next(blocks))
        await feed.until_consistent(5.0)
        await feed.aclose()


@pytest.mark.integration
@pytest.mark.fault("F-27", "F-28", "F-29")
async def test_index_is_consistent_within_five_seconds_after_each_redis_fault() -> None:
    blocks = iter(hashes(64))
    with running_redis() as server, Redis.from_url(server.url) as raw:
        feed = FeedUnderFaults(server.url, raw)
        feed.store(*(next(blocks) for _ in range(8)))
        await feed.until_consistent(5.0)

        raw.flushall()
        feed.store(next(blocks))
        await feed.until_consistent(5.0)

        server.kill()
        feed.store(next(blocks))
        await feed.until(lambda: feed.reader.is_degraded)
        feed.check_degraded(is_degraded=True)
        assert len(feed.index.overlaps([feed.pool.hashes()[0]], 0.0)) == 1  # known blocks are kept as a hint
        await asyncio.to_thread(server.start)
        await feed.until_consistent(5.0)
        await feed.until(lambda: not feed.reader.is_degraded)
        feed.check_degraded(is_degraded=False)

        server.process.send_signal(signal.SIGSTOP)
        feed.store(next(blocks))
        await feed.until(lambda: feed.reader.is_degraded)
        server.process.send_signal(signal.SIGCONT)
        await feed.until_consistent(5.0)

        stream, snapshot_key = (
            key(W) for key in (Keys(cluster="kv-feed").kv_events, Keys(cluster="kv-feed").kv_snapshot)
        )
        for key in (stream, snapshot_key):  # overwritten by another client
            raw.set(key, "invalid")
            feed.store(next(blocks))
            await feed.until_consistent(5.0)
        raw.xadd(stream, {"k": "stored", "t": "device", "s": "4", "h": bytes(16)}, id=f"{2**64 - 1}-0")
        feed.store(next(blocks))
        await feed.until_consistent(5.0)

        raw.config_set("maxmemory", 1)
        feed.store(next(blocks))
        await feed.until(lambda: feed.publisher.is_behind)
        assert feed.publisher.is_behind
        raw.config_set("maxmemory", 0)
        await feed.until_consistent(5.0)
        await feed.aclose()
