"""Keeps the prefix index right: reads every worker's events out of the shared log, beside the decisions,
which never wait for it."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random

from baton.core.errors import StoreUnavailable
from baton.core.ids import WorkerRef
from baton.core.interfaces import KvEventFeed
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import KvEvent, KvEventKind, KvSnapshot, Tier, UnreadableEvent
from baton.prefix_index.event_order import EventAction, EventOrder
from baton.prefix_index.index import PrefixIndex
from baton.runtime.logging import get_logger

log = get_logger(__name__)

READ_WAIT_S = 0.25
"""A worker that joins, and a snapshot that is due, are looked at as late as that while nothing else
happens."""
READ_PAUSE_S = 0.01
"""Between two reads: what many workers write meanwhile comes in one answer."""
EVENTS_A_READ = 256
"""Of all lives together, at most: 2 MiB, if every event is full."""
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0
"""After a failure the store, or one worker's snapshot, is asked for again that late at the latest (half as
much more by chance)."""
ASK_EVERY_S = 1.0
"""How often one worker is asked for a snapshot."""
SNAPSHOTS_AT_ONCE = 4
IMPOSSIBLE_LEAD = 100_000
"""Events that no worker publishes between two of its reports."""
SLICE_BLOCKS = 2_048
"""Put into the index, or cleared away, at one go: about a millisecond."""
SLICE_EVENTS = 8


class _Followed:
    """One life and when its snapshot is to be looked for again."""

    __slots__ = ("ask_at_s", "due_s", "follower", "pause_s")

    def __init__(self, worker: WorkerRef) -> None:
        self.follower = EventOrder(worker)
        self.due_s = 0.0
        self.pause_s = FIRST_RETRY_S
        self.ask_at_s = 0.0


class KvEventFollowing:
    """One task for all workers. `follow` and `unfollow` tell the index, too, so that a worker can be expected
    to hold blocks at once.

    `request_snapshot` is called for a worker whose snapshot is missing or too old (`CommandKind.SNAPSHOT`); it
    must not wait. `on_degraded` is called when the store goes away (True) and when it is back (False).
    """

    def __init__(
        self,
        *,
        feed: KvEventFeed,
        index: PrefixIndex,
        request_snapshot: Callable[[WorkerRef], None],
        on_degraded: Callable[[bool], None],
        rng: Random,
    ) -> None:
        self.is_degraded = False
        self.num_events = dict.fromkeys(EventAction, 0)
        """Entries read, by what became of them."""
        self.num_snapshots = 0
        self._feed = feed
        self._index = index
        self._request_snapshot = request_snapshot
        self._on_degraded = on_degraded
        self._rng = rng
        self._lives: dict[str, _Followed] = {}
        self._joined = asyncio.Event()

    @property
    def num_behind(self) -> int:
        """Workers whose snapshot has yet to be read: what the index has of them is old, or nothing."""
        return sum(life.follower.needs_snapshot for life in self._lives.values())

    def event_seq(self, worker: WorkerRef) -> int:
        """The last event of that life that the index contains; 0 if it is not followed."""
        life = self._life(worker)
        return life.follower.event_seq if life is not None else 0

    def follow(self, worker: WorkerRef, max_blocks: int) -> None:
        """That life reports (again): `max_blocks` is the size of its pool. Any other life of the worker is
        over."""
        self._index.join(worker, max_blocks)
        if self._life(worker) is None:
            self._lives[worker.worker_id] = _Followed(worker)
            self._joined.set()

    def unfollow(self, worker: WorkerRef) -> None:
        """That life is over, as far as we know."""
        if self._life(worker) is not None:
            del self._lives[worker.worker_id]
        self._index.drop(worker)

    def heard(self, worker: WorkerRef, event_seq: int) -> None:
        """That life reports the number of its last event. What lies far beyond it cannot be its own: then we
        begin anew."""
        life = self._life(worker)
        if life is not None and life.follower.event_seq > event_seq + IMPOSSIBLE_LEAD:
            log.warning(
                "kv_events_not_the_workers", worker=str(worker), event_seq=life.follower.event_seq, reported=event_seq
            )
            life.follower.restart()
            self._wait_for_snapshot(life, asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Follow until cancelled."""
        pause_s = FIRST_RETRY_S
        while True:
            try:
                await self._load_snapshots()
                await self._read_events()
            except StoreUnavailable as error:
                self._degrade(str(error))
                await asyncio.sleep(pause_s * (0.5 + self._rng.random()))
                pause_s = min(2 * pause_s, MAX_RETRY_S)
            else:
                self._recover()
                pause_s = FIRST_RETRY_S
                await asyncio.sleep(READ_PAUSE_S)
            while self._index.sweep(SLICE_BLOCKS):  # noqa: ASYNC110 - nothing is waited for: others get their turn
                await asyncio.sleep(0)

    # -- snapshots ----------------------------------------------------------------------------------------------------------------------

    async def _load_snapshots(self) -> None:
        """Of all workers for which it is time. Raises StoreUnavailable."""
        loop = asyncio.get_running_loop()
        due = [life for life in self._lives.values() if life.follower.needs_snapshot and life.due_s <= loop.time()]
        for first in range(0, len(due), SNAPSHOTS_AT_ONCE):
            lives = due[first : first + SNAPSHOTS_AT_ONCE]
            found = await asyncio.gather(*(self._feed.snapshot(life.follower.worker) for life in lives))
            for life, snapshot in zip(lives, found, strict=True):
                if self._life(life.follower.worker) is not life:
                    continue
                if snapshot is not None and life.follower.take_snapshot(snapshot) is EventAction.APPLY:
                    self.num_snapshots += 1
                    life.pause_s = FIRST_RETRY_S
                    await self._put(life, snapshot)
                else:
                    self._wait_for_snapshot(life, loop.time())

    async def _put(self, life: _Followed, snapshot: KvSnapshot) -> None:
        """In slices, between which decisions are made: for a moment less is known of that worker than
        before."""
        worker = life.follower.worker
        self._index.reset(worker)
        for tier, part in _slices(snapshot):
            if self._life(worker) is not life:
                return
            self._index.stored(worker, tier, part)
            await asyncio.sleep(0)

    def _wait_for_snapshot(self, life: _Followed, now_s: float) -> None:
        worker = life.follower.worker
        if now_s >= life.ask_at_s:
            life.ask_at_s = now_s + ASK_EVERY_S
            log.info("kv_snapshot_asked", worker=str(worker), event_seq=life.follower.event_seq)
            self._request_snapshot(worker)
        life.due_s = now_s + life.pause_s * (0.5 + self._rng.random())
        life.pause_s = min(2 * life.pause_s, MAX_RETRY_S)

    # -- events -------------------------------------------------------------------------------------------------------------------------

    async def _read_events(self) -> None:
        """Whatever has come, or nothing within a short wait. Raises StoreUnavailable."""
        lives = self._lives.values()
        after = {life.follower.worker: life.follower.event_seq for life in lives if not life.follower.needs_snapshot}
        next_due_s = min((life.due_s for life in lives if life.follower.needs_snapshot), default=math.inf)
        wait_s = max(READ_PAUSE_S, min(READ_WAIT_S, next_due_s - asyncio.get_running_loop().time()))
        if self.is_degraded:
            wait_s = READ_PAUSE_S  # whether the store is back is to be known soon
        if not after:
            self._joined.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._joined.wait()
            return
        num_taken = 0
        max_events = max(1, EVENTS_A_READ // len(after))
        for worker, events in (await self._feed.read(after, max_events=max_events, wait_s=wait_s)).items():
            for event in events:
                self._take(worker, event)
                num_taken += 1
                if num_taken % SLICE_EVENTS == 0:
                    await asyncio.sleep(0)

    def _take(self, worker: WorkerRef, event: KvEvent | UnreadableEvent) -> None:
        life = self._life(worker)
        if life is None:  # it has left while we read
            return
        followed = life.follower.take_event(event)
        self.num_events[followed] += 1
        if followed is EventAction.APPLY and isinstance(event, KvEvent):
            put = self._index.stored if event.kind is KvEventKind.STORED else self._index.evicted
            put(event.worker, event.tier, event.hashes)
        elif followed in (EventAction.GAP, EventAction.RESET, EventAction.DAMAGED):
            life.due_s = 0.0
            log.info("kv_snapshot_needed", worker=str(event.worker), why=followed.value, event_seq=event.event_seq)

    # -- inside -------------------------------------------------------------------------------------------------------------------------

    def _life(self, worker: WorkerRef) -> _Followed | None:
        life = self._lives.get(worker.worker_id)
        return life if life is not None and life.follower.worker.is_same_incarnation(worker) else None

    def _degrade(self, problem: str) -> None:
        if not self.is_degraded:
            log.warning("kv_events_store_away", problem=problem)
            self.is_degraded = True
            self._on_degraded(True)

    def _recover(self) -> None:
        if self.is_degraded:
            log.info("kv_events_store_back", behind=self.num_behind)
            self.is_degraded = False
            self._on_degraded(False)


def _slices(snapshot: KvSnapshot) -> Iterator[tuple[Tier, Sequence[BlockHash]]]:
    for tier, hashes in snapshot.hashes.items():
        for first in range(0, len(hashes), SLICE_BLOCKS):
            yield tier, hashes[first : first + SLICE_BLOCKS]
