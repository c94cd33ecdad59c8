"""The event reader with publishers, feed and index, under virtual time and with store failures."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

from baton.core.errors import StoreUnavailable
from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import KvEvent, KvEventKind, KvSnapshot, Tier, UnreadableEvent
from baton.engine.kv_cache.block_pool import BlockPool
from baton.prefix_index.event_order import EventAction
from baton.prefix_index.index import PrefixIndex
from baton.scheduler.state.kv_event_reader import SLICE_BLOCKS, KvEventReader
from baton.store.kv_stream_window import MAX_STREAM_BYTES
from baton.store.memory.memory_stores import MemoryKvEventFeed
from baton.worker.reporting.kv_event_publisher import KvEventPublisher
from tests.builders import hashes_of, worker_ref
from tests.fake_executor import FakeGenerationTable
from tests.unit.worker.virtual_loop import virtual

CHAIN = hashes_of(range(40))  # 10 blocks
TTL_S = 30.0
POOL_BLOCKS = 6_000


class Store(MemoryKvEventFeed):
    """A store in memory that can be made unavailable without losing its contents."""

    def __init__(self, max_stream_bytes: int = MAX_STREAM_BYTES) -> None:
        super().__init__(max_stream_bytes=max_stream_bytes)
        self.is_away = False
        self.num_calls = 0

    def flush(self) -> None:
        for key in list(self._feeds._entries):
            self._feeds.pop(key)

    def forge(self, snapshot: KvSnapshot) -> None:
        feed = self._feeds.get((snapshot.worker.worker_id, snapshot.worker.worker_epoch))
        assert feed is not None
        feed.snapshot = snapshot

    async def _call(self) -> None:
        self.num_calls += 1
        await asyncio.sleep(0.001)
        if self.is_away:
            raise StoreUnavailable("away")

    async def publish(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None = None
    ) -> None:
        await self._call()
        await super().publish(worker, events, ttl_s, snapshot)

    async def renew(self, worker: WorkerRef, ttl_s: float) -> int:
        await self._call()
        return await super().renew(worker, ttl_s)

    async def snapshot(self, worker: WorkerRef) -> KvSnapshot | None:
        await self._call()
        return await super().snapshot(worker)

    async def read(
        self, after: Mapping[WorkerRef, int], *, max_events: int, wait_s: float
    ) -> Mapping[WorkerRef, Sequence[KvEvent | UnreadableEvent]]:
        await self._call()
        return await super().read(after, max_events=max_events, wait_s=wait_s)


class Worker:
    """The part of a worker that publishes events."""

    def __init__(self, ref: WorkerRef, feed: Store) -> None:
        self.ref = ref
        self.pool = BlockPool(POOL_BLOCKS, 4, FakeGenerationTable(POOL_BLOCKS))
        self.publisher = KvEventPublisher(
            worker=ref, pool=self.pool, feed=feed, ttl_s=TTL_S, rng=Random(ref.worker_epoch)
        )
        self.task = asyncio.create_task(self.publisher.run())

    def store(self, *hashes: bytes) -> None:
        blocks = self.pool.allocate(len(hashes))
        assert blocks is not None
        for block_id, block_hash in zip(blocks, hashes, strict=True):
            self.pool.set_hash(block_id, block_hash)
        self.pool.unref(blocks)
        self.publisher.wake()


class Rig:
    """The reader of one scheduler, and workers that publish."""

    def __init__(self, feed: Store) -> None:
        self.feed = feed
        self.index = PrefixIndex()
        self.degraded: list[bool] = []
        self.asked: list[WorkerRef] = []
        self.workers: dict[WorkerRef, Worker] = {}
        self.reader = KvEventReader(
            feed=feed, index=self.index, request_snapshot=self.ask, on_degraded=self.degraded.append, rng=Random(0)
        )
        self.task = asyncio.create_task(self.reader.run())

    def ask(self, worker: WorkerRef) -> None:
        self.asked.append(worker)
        if worker in self.workers:
            self.workers[worker].publisher.request_snapshot()

    def start(self, worker_id: str = "w0", epoch: int = 1) -> Worker:
        worker = Worker(worker_ref(worker_id, epoch), self.feed)
        self.workers[worker.ref] = worker
        self.reader.follow(worker.ref, POOL_BLOCKS)
        return worker

    def runs(self, hashes: Sequence[bytes] = CHAIN) -> dict[str, int]:
        now_s = asyncio.get_running_loop().time()
        return {worker_id: overlap.num_held_blocks for worker_id, overlap in self.index.overlaps(hashes, now_s).items()}


@asynccontextmanager
async def rig_of(feed: Store | None = None) -> AsyncIterator[Rig]:
    rig = Rig(feed or Store())
    try:
        yield rig
    finally:
        for task in (rig.task, *(worker.task for worker in rig.workers.values())):
            assert not task.done(), task
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@virtual
async def test_index_follows_stored_blocks() -> None:
    async with rig_of() as rig:
        w0, w1 = rig.start("w0"), rig.start("w1")
        w0.store(*CHAIN[:4])
        await asyncio.sleep(0.5)
        assert rig.runs() == {"w0": 4}
        w0.store(*CHAIN[4:6])
        w1.store(*CHAIN[:1])
        await asyncio.sleep(0.1)
        assert rig.runs() == {"w0": 6, "w1": 1}
        assert (rig.reader.num_behind, rig.reader.event_seq(w0.ref)) == (0, w0.publisher.event_seq)


@virtual
async def test_evictions_are_remembered() -> None:
    async with rig_of() as rig:
        w0 = rig.start()
        w0.store(*CHAIN[:3])
        await asyncio.sleep(1.0)
        w0.pool.unref(w0.pool.allocate(w0.pool.num_allocatable) or [])
        w0.publisher.wake()
        await asyncio.sleep(1.0)
        position, eviction = rig.index.evictions.last_of(CHAIN) or (None, None)
        assert (position, eviction and eviction.worker_id, rig.runs()) == (2, "w0", {})


@virtual
async def test_new_reader_starts_with_the_snapshot() -> None:
    async with rig_of() as rig:
        w0 = rig.start()
        blocks = hashes_of(range(4 * (2 * SLICE_BLOCKS + 7)))
        w0.store(*blocks)
        await asyncio.sleep(1.0)
        late = Rig(rig.feed)
        late.reader.follow(w0.ref, POOL_BLOCKS)
        await asyncio.sleep(0.3)
        assert late.runs(blocks) == {"w0": len(blocks)}
        assert late.reader.num_snapshots == 1
        late.task.cancel()


@virtual
async def test_equal_events_give_equal_indexes_in_every_scheduler() -> None:
    async with rig_of() as rig:
        workers, rng = [rig.start(f"w{i}") for i in range(3)], Random(5)
        other = Rig(rig.feed)
        for number in range(60):
            rng.choice(workers).store(*hashes_of([number % 7] * rng.randint(4, 40)))
            if number == 30:
                for worker in workers:
                    other.reader.follow(worker.ref, POOL_BLOCKS)
            await asyncio.sleep(0.02 * rng.random())
        await asyncio.sleep(1.0)
        for number in range(7):
            assert rig.runs(hashes_of([number] * 40)) == other.runs(hashes_of([number] * 40)) != {}
        other.task.cancel()


@virtual
async def test_restarted_worker_starts_empty_and_its_old_epoch_is_removed() -> None:
    async with rig_of() as rig:
        rig.start().store(*CHAIN)
        await asyncio.sleep(0.5)
        reborn = rig.start(epoch=2)
        assert rig.runs() == {}
        reborn.store(*CHAIN[:2])
        await asyncio.sleep(0.5)
        assert (rig.runs(), rig.index.num_ended_claims) == ({"w0": 2}, 0)
        rig.reader.unfollow(worker_ref("w0", epoch=1))  # the old stream breaks late
        assert rig.runs() == {"w0": 2}
        rig.reader.unfollow(reborn.ref)
        assert (rig.runs(), rig.reader.event_seq(reborn.ref)) == ({}, 0)


@virtual
async def test_index_stays_usable_without_the_store_and_catches_up_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with rig_of() as rig:
        w0 = rig.start()
        w0.store(*CHAIN[:3])
        await asyncio.sleep(0.5)
        rig.feed.is_away = True
        calls = rig.feed.num_calls
        w0.store(*CHAIN[3:5])
        await asyncio.sleep(60.0)
        assert (rig.runs(), rig.degraded) == ({"w0": 3}, [True])
        assert rig.feed.num_calls - calls < 60 * (1.5 + 4)  # both sides pause between retries
        rig.feed.is_away = False
        await asyncio.sleep(3.0)
        assert (rig.runs(), rig.degraded, rig.reader.is_degraded) == ({"w0": 5}, [True, False], False)
    events: list[Any] = [record.msg for record in caplog.records if record.name == KvEventReader.__module__]
    assert [event["event"] for event in events if event.get("use") == "kv_events"] == [
        "store_became_unavailable",
        "store_recovered",
    ]


@virtual
async def test_index_recovers_from_a_flushed_store() -> None:
    async with rig_of() as rig:
        w0, w1 = rig.start("w0"), rig.start("w1")
        for worker in (w0, w1):
            worker.store(*CHAIN[:3])
        await asyncio.sleep(0.5)
        w0.store(*CHAIN[3:5])
        await asyncio.sleep(0.021)  # published, perhaps not read yet
        rig.feed.flush()
        await asyncio.sleep(5.0)
        assert rig.runs() == {"w0": 5, "w1": 3}
        late = Rig(rig.feed)
        late.reader.follow(w1.ref, POOL_BLOCKS)
        await asyncio.sleep(1.0)
        assert late.runs() == {"w1": 3}
        late.task.cancel()


@virtual
async def test_trimmed_events_are_replaced_by_a_snapshot() -> None:
    async with rig_of(Store(max_stream_bytes=3 * 220)) as rig:
        w0 = rig.start()
        await asyncio.sleep(0.5)
        rig.asked.clear()
        rig.task.cancel()  # the scheduler stalls
        for number in range(8):
            w0.store(CHAIN[number])
            await asyncio.sleep(0.1)
        rig.task = asyncio.create_task(rig.reader.run())
        await asyncio.sleep(1.0)
        assert rig.runs() == {"w0": 8}
        assert rig.reader.num_events[EventAction.GAP] == 1
        assert rig.asked == [w0.ref]


@virtual
async def test_silent_publisher_is_asked_at_intervals_and_does_not_delay_others() -> None:
    async with rig_of() as rig:
        mute = worker_ref("mute")
        rig.reader.follow(mute, POOL_BLOCKS)
        rig.start("w0").store(*CHAIN[:3])
        await asyncio.sleep(10.0)
        assert (rig.runs(), rig.reader.num_behind) == ({"w0": 3}, 1)
        assert 5 <= rig.asked.count(mute) <= 11


@virtual
async def test_forged_event_is_removed_by_the_next_snapshot() -> None:
    async with rig_of() as rig:
        w0 = rig.start()
        w0.store(*CHAIN[:2])
        await asyncio.sleep(0.5)
        seq = w0.publisher.event_seq
        forged = KvEvent(
            worker=w0.ref, event_seq=seq + 1, kind=KvEventKind.STORED, hashes=CHAIN[2:], block_size_tokens=4
        )
        await rig.feed.publish(w0.ref, [forged], TTL_S)
        await asyncio.sleep(0.3)
        assert rig.runs() == {"w0": 10}
        await asyncio.sleep(3.0)  # the worker detects an event that it did not publish
        assert rig.runs() == {"w0": 2}


@virtual
async def test_forged_snapshot_with_implausible_event_seq_is_discarded() -> None:
    async with rig_of() as rig:
        w0 = rig.start()
        w0.store(*CHAIN[:2])
        await asyncio.sleep(0.5)
        rig.feed.forge(KvSnapshot(worker=w0.ref, event_seq=2**60, block_size_tokens=4, hashes={Tier.DEVICE: CHAIN}))
        late = Rig(rig.feed)
        late.workers = rig.workers
        late.reader.follow(w0.ref, POOL_BLOCKS)
        await asyncio.sleep(0.5)
        assert late.runs() == {"w0": 10}
        late.reader.check_event_seq(w0.ref, w0.publisher.event_seq)
        await asyncio.sleep(1.0)
        w0.store(*CHAIN[2:3])
        await asyncio.sleep(0.3)
        assert late.runs() == {"w0": 3}
        late.task.cancel()
        late.workers = {}
