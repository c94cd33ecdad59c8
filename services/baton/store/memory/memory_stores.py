"""In-memory counterparts of the Redis stores, for `fleet/local`, the simulator and tests.

Entries expire by the time of the running event loop, or by a clock that the caller passes.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, islice
from typing import Generic, TypeVar

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.errors import StoreUnavailable
from baton.core.ids import Incarnation, WorkerRef
from baton.core.interfaces import Member, MemberKind
from baton.core.kv.kv_events import KvEvent, KvEventKind, KvSnapshot, UnreadableEvent
from baton.core.step_cost import StepCostModel
from baton.store.kv_stream_window import MAX_STREAM_BYTES, KvStreamWindow

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

Clock = Callable[[], float]


def loop_time_s() -> float:
    """Return the time of the running event loop in seconds."""
    return asyncio.get_running_loop().time()


class _Expiring(Generic[KeyT, ValueT]):
    """Dict with expiring entries."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[KeyT, tuple[ValueT, float]] = {}
        self._expiries: list[tuple[float, int, KeyT]] = []  # heap with one entry per `put`
        self._order = count()

    def put(self, key: KeyT, value: ValueT, ttl_s: float) -> None:
        self._drop_expired()
        expiry_s = self._clock() + ttl_s
        self._entries[key] = (value, expiry_s)
        heappush(self._expiries, (expiry_s, next(self._order), key))

    def get(self, key: KeyT) -> ValueT | None:
        self._drop_expired()
        value, _ = self._entries.get(key, (None, 0.0))
        return value

    def pop(self, key: KeyT) -> None:
        self._entries.pop(key, None)

    def values(self) -> list[ValueT]:
        self._drop_expired()
        return [value for value, _ in self._entries.values()]

    def _drop_expired(self) -> None:
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, _, key = heappop(self._expiries)
            if key in self._entries and self._entries[key][1] <= now_s:  # a later `put` may have extended it
                del self._entries[key]


class MemoryMembership:
    """Implements `Membership`. The id identifies a member, so a new incarnation replaces the old one."""

    def __init__(self, clock: Clock = loop_time_s) -> None:
        self._members: _Expiring[tuple[MemberKind, str], Member] = _Expiring(clock)

    async def announce(self, member: Member, ttl_s: float) -> None:
        self._members.put((member.kind, member.member_id), member, ttl_s)

    async def withdraw(self, member: Member) -> None:
        key = (member.kind, member.member_id)
        known = self._members.get(key)
        if known is not None and known.epoch == member.epoch:
            self._members.pop(key)

    async def members(self, kind: MemberKind) -> tuple[Member, ...]:
        return tuple(sorted((m for m in self._members.values() if m.kind is kind), key=lambda member: member.member_id))


class MemoryDecisionStore:
    """Implements `DecisionStore`."""

    def __init__(self, clock: Clock = loop_time_s) -> None:
        self._records: _Expiring[bytes, dict[int, DecisionRecord]] = _Expiring(clock)
        self._last: _Expiring[None, bytes] = _Expiring(clock)

    async def put(self, record: DecisionRecord, ttl_s: float) -> None:
        attempts = self._records.get(record.request_id) or {}
        self._records.put(record.request_id, {**attempts, record.attempt: record}, ttl_s)
        self._last.put(None, record.request_id, ttl_s)

    async def get(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        if request_id is None:
            request_id = self._last.get(None)
        attempts = (self._records.get(request_id) if request_id is not None else None) or {}
        return tuple(attempts[attempt] for attempt in sorted(attempts))


class MemoryCostStore:
    """Implements `CostStore`."""

    def __init__(self) -> None:
        self._costs: _Expiring[str, StepCostModel] = _Expiring(loop_time_s)

    async def put(self, key: str, costs: StepCostModel, ttl_s: float) -> None:
        self._costs.put(key, costs, ttl_s)

    async def get(self, key: str) -> StepCostModel | None:
        return self._costs.get(key)


@dataclass(slots=True)
class _Feed:
    """Event stream and snapshot of one worker incarnation."""

    window: KvStreamWindow
    events: deque[KvEvent | UnreadableEvent] = field(default_factory=deque)
    last_seq: int = 0
    snapshot: KvSnapshot | None = None


@dataclass(slots=True)
class _Notification:
    """Wakes all coroutines that are waiting at that moment."""

    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    async def wait(self) -> None:
        notified = asyncio.get_running_loop().create_future()
        self.waiting.append(notified)
        try:
            await notified
        finally:
            if notified in self.waiting:
                self.waiting.remove(notified)

    def notify_all(self) -> None:
        waiting, self.waiting = self.waiting, []
        for notified in waiting:
            if not notified.done():
                notified.set_result(None)


class MemoryKvEventFeed:
    """Implements `KvEventFeed`, with one stream per worker incarnation.

    A stream keeps the same events as in Redis. There is no limit for all streams together, as in a Redis
    without `maxmemory`.
    """

    def __init__(self, clock: Clock = loop_time_s, *, max_stream_bytes: int = MAX_STREAM_BYTES) -> None:
        self._max_stream_bytes = max_stream_bytes
        self._feeds: _Expiring[Incarnation, _Feed] = _Expiring(clock)
        self._written = _Notification()

    async def publish(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None = None
    ) -> None:
        feed = self._feeds.get(worker.incarnation) or _Feed(KvStreamWindow(self._max_stream_bytes))
        for event in events:
            if event.event_seq <= feed.last_seq:
                raise StoreUnavailable(f"event_seq is {event.event_seq}; must be above the last one, {feed.last_seq}")
            feed.events.append(event)
            feed.window.append(event)
            feed.last_seq = event.event_seq
        if snapshot is not None:
            feed.snapshot = snapshot
            feed.window.replace_snapshot(snapshot)
        first_seq = feed.window.trim() or 0
        while feed.events and feed.events[0].event_seq < first_seq:
            feed.events.popleft()
        self._feeds.put(worker.incarnation, feed, ttl_s)
        self._written.notify_all()

    async def reset(self, snapshot: KvSnapshot, ttl_s: float) -> None:
        event = KvEvent(
            worker=snapshot.worker,
            event_seq=snapshot.event_seq,
            kind=KvEventKind.RESET,
            block_size_tokens=snapshot.block_size_tokens,
        )
        self.remove(snapshot.worker)
        await self.publish(snapshot.worker, [event], ttl_s, snapshot)

    def remove(self, worker: WorkerRef) -> None:
        """Remove stream and snapshot of a worker incarnation, as a full Redis does after a refused write."""
        self._feeds.pop(worker.incarnation)

    async def renew(self, worker: WorkerRef, ttl_s: float) -> int:
        feed = self._feeds.get(worker.incarnation)
        if feed is None:
            return 0
        self._feeds.put(worker.incarnation, feed, ttl_s)
        return feed.last_seq if feed.snapshot is not None else 0

    async def snapshot(self, worker: WorkerRef) -> KvSnapshot | None:
        feed = self._feeds.get(worker.incarnation)
        return feed.snapshot if feed is not None else None

    async def read(
        self, after: Mapping[WorkerRef, int], *, max_events: int, wait_s: float
    ) -> Mapping[WorkerRef, Sequence[KvEvent | UnreadableEvent]]:
        found = self._since(after, max_events)
        if after and not found:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not found:
                        await self._written.wait()
                        found = self._since(after, max_events)
        return found

    def _since(
        self, after: Mapping[WorkerRef, int], max_events: int
    ) -> dict[WorkerRef, list[KvEvent | UnreadableEvent]]:
        found = {}
        for worker, event_seq in after.items():
            feed = self._feeds.get(worker.incarnation)
            newer = (
                [] if feed is None else list(islice((e for e in feed.events if e.event_seq > event_seq), max_events))
            )
            if newer:
                found[worker] = newer
        return found
