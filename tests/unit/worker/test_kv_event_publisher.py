"""Tests of the KV event publisher: what it writes, and how it recovers when the store was unavailable or lost
data."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

from baton.core.errors import StoreUnavailable
from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import MAX_EVENT_HASHES, KvEvent, KvEventKind, KvSnapshot, Tier, UnreadableEvent
from baton.engine.kv_cache.block_pool import BlockPool
from baton.store.memory.memory_stores import MemoryKvEventFeed
from baton.worker.reporting.kv_event_publisher import EVENTS_PER_WRITE, KvEventPublisher
from tests.builders import hashes_of, worker_ref
from tests.fake_executor import FakeGenerationTable
from tests.unit.worker.virtual_loop import virtual

STORED, EVICTED, RESET = KvEventKind.STORED, KvEventKind.EVICTED, KvEventKind.RESET
W = worker_ref("w0", epoch=3)
A, B, C, D = hashes_of(range(16))
TTL_S = 30.0


class FailingFeed(MemoryKvEventFeed):
    """A store that can be unavailable or slow. A call that failed may have been executed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.loses_answers = False
        self.refuses_events = False
        self.call_s = 0.0
        self.writes: list[int] = []

    async def _call(self) -> None:
        await asyncio.sleep(self.call_s)
        if self.is_away:
            raise StoreUnavailable("away")

    async def publish(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None = None
    ) -> None:
        await self._call()
        if self.refuses_events and all(event.kind is not RESET for event in events):
            raise StoreUnavailable("no room")
        self.writes.append(len(events))
        await super().publish(worker, events, ttl_s, snapshot)
        if self.loses_answers:
            self.is_away = True
            raise StoreUnavailable("no answer")

    async def renew(self, worker: WorkerRef, ttl_s: float) -> int:
        await self._call()
        return await super().renew(worker, ttl_s)


class Rig:
    """A pool, its publisher, and the feed that it writes to."""

    def __init__(self, num_blocks: int = 64, feed: FailingFeed | None = None) -> None:
        self.pool = BlockPool(num_blocks, 4, FakeGenerationTable(num_blocks))
        self.feed = feed or FailingFeed()
        self.publisher = KvEventPublisher(worker=W, pool=self.pool, feed=self.feed, ttl_s=TTL_S, rng=Random(1))

    def store(self, *hashes: bytes, keep: bool = False) -> list[int]:
        blocks = self.pool.allocate(len(hashes))
        assert blocks is not None
        for block_id, block_hash in zip(blocks, hashes, strict=True):
            self.pool.set_hash(block_id, block_hash)
        if not keep:
            self.pool.unref(blocks)
        self.publisher.wake()
        return blocks

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.publisher.run())
        try:
            await asyncio.sleep(0.1)
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def events(self, after: int = 0) -> list[KvEvent | UnreadableEvent]:
        return list((await self.feed.read({W: after}, max_events=10_000, wait_s=0.0)).get(W, ()))

    async def held(self) -> set[bytes]:
        """Return what the feed says is held: the snapshot with the events after it."""
        snapshot = await self.feed.snapshot(W)
        assert snapshot is not None
        held = set(snapshot.hashes[Tier.DEVICE])
        for number, event in enumerate(await self.events(snapshot.event_seq), snapshot.event_seq + 1):
            assert isinstance(event, KvEvent)
            assert event.event_seq == number
            held = held | set(event.hashes) if event.kind is STORED else held - set(event.hashes)
        return held


@virtual
async def test_stream_begins_with_a_reset_and_a_snapshot() -> None:
    rig = Rig()
    rig.store(A, B)
    async with rig.running():
        assert [(e.event_seq, e.kind) for e in await rig.events() if isinstance(e, KvEvent)] == [(1, RESET)]
        assert await rig.feed.snapshot(W) == KvSnapshot(
            worker=W, event_seq=1, block_size_tokens=4, hashes={Tier.DEVICE: (A, B)}
        )


@virtual
async def test_changes_of_several_steps_are_written_together_evictions_first() -> None:
    rig = Rig(num_blocks=3)
    async with rig.running():
        rig.store(A, B)
        await asyncio.sleep(0.1)
        rig.store(C)
        rig.store(D)  # the pool is full: B, the tail of its chain, goes
        await asyncio.sleep(0.1)
        events = await rig.events(after=1)
        assert events == [
            KvEvent(worker=W, event_seq=2, kind=STORED, hashes=(A, B), block_size_tokens=4),
            KvEvent(worker=W, event_seq=3, kind=EVICTED, hashes=(B,), block_size_tokens=4),
            KvEvent(worker=W, event_seq=4, kind=STORED, hashes=(C, D), block_size_tokens=4),
        ]
        assert (rig.publisher.event_seq, rig.publisher.num_stored, rig.publisher.num_evicted) == (4, 4, 1)


@virtual
async def test_many_changes_are_split_into_bounded_events_and_writes() -> None:
    number = (EVENTS_PER_WRITE + 2) * MAX_EVENT_HASHES - 5
    rig = Rig(num_blocks=2 * number)
    rig.store(
        *hashes_of(range(10**6, 10**6 + 4 * number))
    )  # with so many blocks, these changes are cheaper than a snapshot
    async with rig.running():
        rig.feed.writes.clear()
        rig.store(*hashes_of(range(4 * number)))
        await asyncio.sleep(0.1)
        assert rig.feed.writes == [EVENTS_PER_WRITE, 2]
        assert {len(e.hashes) for e in await rig.events(after=1) if isinstance(e, KvEvent)} == {
            MAX_EVENT_HASHES,
            MAX_EVENT_HASHES - 5,
        }
        assert await rig.held() == set(rig.pool.hashes())


@virtual
async def test_snapshot_is_written_periodically_and_on_request() -> None:
    rig = Rig(num_blocks=8)
    async with rig.running():
        for number in range(2_000):
            rig.store(hashes_of([number] * 4)[0])
            await asyncio.sleep(0.03)
        kept = await rig.feed.snapshot(W)
        assert kept is not None
        assert 1_000 < rig.publisher.event_seq - kept.event_seq + 1_024 < 2 * 1_024
        assert await rig.held() == set(rig.pool.hashes())
        rig.publisher.request_snapshot()
        rig.publisher.request_snapshot()
        await asyncio.sleep(0.1)
        kept = await rig.feed.snapshot(W)
        assert kept is not None
        assert (kept.event_seq, set(kept.hashes[Tier.DEVICE])) == (rig.publisher.event_seq, set(rig.pool.hashes()))


@virtual
async def test_recovered_store_gets_everything_within_a_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig()
    async with rig.running():
        rig.feed.is_away = True
        rig.store(A, B)
        await asyncio.sleep(60.0)
        assert rig.publisher.is_behind
        rig.store(C)
        rig.feed.is_away = False
        await asyncio.sleep(1.0)
        assert not rig.publisher.is_behind
        assert [e.kind for e in await rig.events() if isinstance(e, KvEvent)] == [RESET]
        assert await rig.held() == {A, B, C}
        rig.store(D)
        await asyncio.sleep(0.1)
        assert await rig.held() == {A, B, C, D}
    logged: list[Any] = [record.msg for record in caplog.records if record.name == KvEventPublisher.__module__]
    assert [(event["event"], event["use"]) for event in logged] == [
        ("store_became_unavailable", "kv_events"),
        ("store_recovered", "kv_events"),
    ]


@virtual
async def test_write_with_unknown_outcome_is_followed_by_a_reset() -> None:
    rig = Rig()
    async with rig.running():
        rig.feed.loses_answers = True
        rig.store(A)
        await asyncio.sleep(0.1)
        rig.feed.loses_answers = rig.feed.is_away = False
        await asyncio.sleep(1.0)
        assert [(e.event_seq, e.kind) for e in await rig.events() if isinstance(e, KvEvent)] == [(3, RESET)]
        assert await rig.held() == {A}


@virtual
async def test_lost_or_modified_stream_is_detected_within_two_seconds() -> None:
    rig = Rig()
    rig.store(A)
    async with rig.running():
        rig.feed._feeds.pop((W.worker_id, W.worker_epoch))
        await asyncio.sleep(2.0)
        assert await rig.held() == {A}
        await rig.feed.publish(
            W, [KvEvent(worker=W, event_seq=2**60, kind=STORED, hashes=(B,), block_size_tokens=4)], TTL_S
        )
        await asyncio.sleep(2.0)
        assert await rig.held() == {A}
        rig.store(C)
        await asyncio.sleep(0.1)
        assert await rig.held() == {A, C}


@virtual
async def test_stream_expires_some_time_after_the_worker_has_ended() -> None:
    rig = Rig()
    rig.store(A)
    async with rig.running():
        await asyncio.sleep(10 * TTL_S)
        assert (await rig.held(), rig.publisher.num_resets) == ({A}, 1)
    await asyncio.sleep(TTL_S + 1)
    assert await rig.feed.snapshot(W) is None


@virtual
async def test_slow_store_delays_no_step_and_gets_the_net_change() -> None:
    rig = Rig(num_blocks=4)
    async with rig.running():
        rig.feed.call_s = 0.9
        began = rig.publisher.event_seq
        for number in range(200):
            rig.store(hashes_of([number] * 4)[0])
            await asyncio.sleep(0.01)
        assert rig.publisher.event_seq - began < 10
        await asyncio.sleep(4.0)
        assert await rig.held() == set(rig.pool.hashes())


@virtual
async def test_store_that_refuses_events_but_no_resets_gets_few_resets() -> None:
    rig = Rig()
    async with rig.running():
        rig.feed.refuses_events = True
        for number in range(1_000):
            rig.store(hashes_of([number] * 4)[0])
            await asyncio.sleep(0.01)
        assert 10 <= rig.publisher.num_resets <= 40  # in 10 s
        rig.feed.refuses_events = False
        await asyncio.sleep(2.0)
        assert await rig.held() == set(rig.pool.hashes())
