"""Keeps the prefix index up to date from the workers' KV events in the shared log.

Runs beside the decisions, which never wait for it.
"""

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
"""Longest wait of one read. New workers and due snapshots are noticed no later than that."""
READ_PAUSE_S = 0.01
"""Time between two reads, so that one answer contains the events of many workers."""
EVENTS_PER_READ = 256
"""Limit for all workers together: 2 MiB if every event is full."""
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0
"""First and longest pause before the store, or one worker's snapshot, is tried again.

Each is varied by 50 %.
"""
SNAPSHOT_REQUEST_INTERVAL_S = 1.0
"""Least time between two requests to one worker to publish a snapshot."""
MAX_CONCURRENT_SNAPSHOTS = 4
IMPLAUSIBLE_LEAD = 100_000
"""More events than a worker publishes between two of its reports."""
SLICE_BLOCKS = 2_048
"""Blocks that are indexed or removed without yielding to the event loop: about a millisecond."""
SLICE_EVENTS = 8


class _FollowedWorker:
    """One worker epoch, the order of its events, and when its snapshot is to be read next."""

    __slots__ = ("due_s", "order", "pause_s", "request_at_s")

    def __init__(self, worker: WorkerRef) -> None:
        self.order = EventOrder(worker)
        self.due_s = 0.0
        self.pause_s = FIRST_RETRY_S
        self.request_at_s = 0.0


class KvEventReader:
    """Reads the KV events of all followed workers in one task, and applies them to the prefix index.

    request_snapshot(worker): is called for a worker whose snapshot is missing or too old. Must not block.
    on_degraded(is_degraded): is called when the store becomes unavailable (True) and available again (False).
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
        """Events read, by what was done with them."""
        self.num_snapshots = 0
        self._feed = feed
        self._index = index
        self._request_snapshot = request_snapshot
        self._on_degraded = on_degraded
        self._rng = rng
        self._workers: dict[str, _FollowedWorker] = {}
        self._joined = asyncio.Event()

    @property
    def num_behind(self) -> int:
        """Workers whose snapshot was not read yet. Their part of the index is old or empty."""
        return sum(followed.order.needs_snapshot for followed in self._workers.values())

    def event_seq(self, worker: WorkerRef) -> int:
        """Return the number of the last event of this epoch in the index, or 0 if it is not followed."""
        followed = self._followed(worker)
        return followed.order.event_seq if followed is not None else 0

    def follow(self, worker: WorkerRef, max_blocks: int, announce_every: int = 1) -> None:
        """Start following a worker epoch, or do nothing if it is followed. Other epochs of the worker end.

        The worker is added to the index immediately, so that blocks can be expected on it. `max_blocks`: size
        of its pool. `announce_every`: see `WorkerReport`.
        """
        self._index.join(worker, max_blocks, announce_every)
        if self._followed(worker) is None:
            self._workers[worker.worker_id] = _FollowedWorker(worker)
            self._joined.set()

    def unfollow(self, worker: WorkerRef) -> None:
        """Stop following a worker epoch and remove its blocks from the index."""
        if self._followed(worker) is not None:
            del self._workers[worker.worker_id]
        self._index.drop(worker)

    def check_event_seq(self, worker: WorkerRef, event_seq: int) -> None:
        """Compare the index with the number of the last event that the worker itself reports.

        If the index is implausibly far ahead, its events were not the worker's, and it starts again with a
        snapshot.
        """
        followed = self._followed(worker)
        if followed is not None and followed.order.event_seq > event_seq + IMPLAUSIBLE_LEAD:
            log.warning(
                "kv_events_rejected",
                worker=str(worker),
                reason="implausible_event_seq",
                event_seq=followed.order.event_seq,
                reported=event_seq,
            )
            followed.order.restart()
            self._retry_snapshot(followed, asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Follow the workers until cancelled."""
        pause_s = FIRST_RETRY_S
        while True:
            try:
                await self._load_snapshots()
                await self._read_events()
            except StoreUnavailable as error:
                self._set_degraded(str(error))
                await asyncio.sleep(pause_s * (0.5 + self._rng.random()))
                pause_s = min(2 * pause_s, MAX_RETRY_S)
            else:
                self._set_recovered()
                pause_s = FIRST_RETRY_S
                await asyncio.sleep(READ_PAUSE_S)
            while self._index.sweep(SLICE_BLOCKS):  # noqa: ASYNC110 - yields to the event loop between slices
                await asyncio.sleep(0)

    async def _load_snapshots(self) -> None:
        """Read the snapshots that are due. Raises StoreUnavailable."""
        loop = asyncio.get_running_loop()
        due = [each for each in self._workers.values() if each.order.needs_snapshot and each.due_s <= loop.time()]
        for first in range(0, len(due), MAX_CONCURRENT_SNAPSHOTS):
            part = due[first : first + MAX_CONCURRENT_SNAPSHOTS]
            snapshots = await asyncio.gather(*(self._feed.snapshot(each.order.worker) for each in part))
            for followed, snapshot in zip(part, snapshots, strict=True):
                if self._followed(followed.order.worker) is not followed:
                    continue
                if snapshot is not None and followed.order.take_snapshot(snapshot) is EventAction.APPLY:
                    self.num_snapshots += 1
                    followed.pause_s = FIRST_RETRY_S
                    await self._apply_snapshot(followed, snapshot)
                else:
                    self._retry_snapshot(followed, loop.time())

    async def _apply_snapshot(self, followed: _FollowedWorker, snapshot: KvSnapshot) -> None:
        """Replace the worker's blocks in the index.

        Decisions are made between the slices. For a moment the index knows less of the worker than before.
        """
        worker = followed.order.worker
        self._index.reset(worker)
        for tier, hashes in _slices(snapshot):
            if self._followed(worker) is not followed:
                return
            self._index.stored(worker, tier, hashes)
            await asyncio.sleep(0)

    def _retry_snapshot(self, followed: _FollowedWorker, now_s: float) -> None:
        """Read the snapshot again later, and ask the worker for a new one unless it was asked recently."""
        worker = followed.order.worker
        if now_s >= followed.request_at_s:
            followed.request_at_s = now_s + SNAPSHOT_REQUEST_INTERVAL_S
            log.info("kv_snapshot_requested", worker=str(worker), event_seq=followed.order.event_seq)
            self._request_snapshot(worker)
        followed.due_s = now_s + followed.pause_s * (0.5 + self._rng.random())
        followed.pause_s = min(2 * followed.pause_s, MAX_RETRY_S)

    async def _read_events(self) -> None:
        """Read and apply new events, or wait briefly if there are none. Raises StoreUnavailable."""
        workers = self._workers.values()
        after = {each.order.worker: each.order.event_seq for each in workers if not each.order.needs_snapshot}
        next_due_s = min((each.due_s for each in workers if each.order.needs_snapshot), default=math.inf)
        wait_s = max(READ_PAUSE_S, min(READ_WAIT_S, next_due_s - asyncio.get_running_loop().time()))
        if self.is_degraded:
            wait_s = READ_PAUSE_S  # detect soon that the store is available again
        if not after:
            self._joined.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._joined.wait()
            return
        num_applied = 0
        max_events = max(1, EVENTS_PER_READ // len(after))
        for worker, events in (await self._feed.read(after, max_events=max_events, wait_s=wait_s)).items():
            for event in events:
                self._apply_event(worker, event)
                num_applied += 1
                if num_applied % SLICE_EVENTS == 0:
                    await asyncio.sleep(0)

    def _apply_event(self, worker: WorkerRef, event: KvEvent | UnreadableEvent) -> None:
        followed = self._followed(worker)
        if followed is None:  # unfollowed during the read
            return
        action = followed.order.take_event(event)
        self.num_events[action] += 1
        if action is EventAction.APPLY and isinstance(event, KvEvent):
            if event.kind is KvEventKind.STORED:
                self._index.stored(event.worker, event.tier, event.hashes)
            else:
                self._index.evicted(event.worker, event.tier, event.hashes)
                now_s = asyncio.get_running_loop().time()
                self._index.evictions.add(event.worker.worker_id, event.hashes, now_s)
        elif action in (EventAction.GAP, EventAction.RESET, EventAction.DAMAGED):
            followed.due_s = 0.0
            log.info("kv_events_interrupted", worker=str(event.worker), reason=action.value, event_seq=event.event_seq)

    def _followed(self, worker: WorkerRef) -> _FollowedWorker | None:
        followed = self._workers.get(worker.worker_id)
        return followed if followed is not None and followed.order.worker.is_same_incarnation(worker) else None

    def _set_degraded(self, problem: str) -> None:
        if not self.is_degraded:
            log.warning("store_became_unavailable", use="kv_events", problem=problem)
            self.is_degraded = True
            self._on_degraded(True)

    def _set_recovered(self) -> None:
        if self.is_degraded:
            log.info("store_recovered", use="kv_events", workers_behind=self.num_behind)
            self.is_degraded = False
            self._on_degraded(False)


def _slices(snapshot: KvSnapshot) -> Iterator[tuple[Tier, Sequence[BlockHash]]]:
    for tier, hashes in snapshot.hashes.items():
        for first in range(0, len(hashes), SLICE_BLOCKS):
            yield tier, hashes[first : first + SLICE_BLOCKS]
