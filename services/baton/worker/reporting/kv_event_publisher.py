"""Tells the shared log which blocks this worker holds. No step waits for it: what happens is noted by the
pool, net, until it is taken.

A life begins with RESET and a snapshot. While the store is away nothing is kept for it; when it is back, or
has lost what it had, RESET and a snapshot stand for everything since.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Protocol

from baton.core.errors import StoreUnavailable
from baton.core.ids import WorkerRef
from baton.core.interfaces import KvEventFeed
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import MAX_EVENT_HASHES, KvEvent, KvEventKind, KvSnapshot, Tier
from baton.runtime.logging import get_logger

log = get_logger(__name__)

INTERVAL_S = 0.02
"""Between two writes: what several steps do goes out together."""
RENEW_S = 1.0
"""How often the store is asked whether it still has what it was told; what no step announces is noticed as
late as that."""
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 0.5
EVENTS_A_SNAPSHOT = 1_024
"""A snapshot is written after so many events, far fewer than a stream keeps..."""
HASHES_A_SNAPSHOT = 16_384
"""... or after so many hashes, if that is more than are held: so snapshots cost no more than the events
themselves."""
EVENTS_A_WRITE = 32
"""256 KiB."""
MAX_FOREIGN_SEQ = 2**62
"""Entries that somebody else wrote are passed up to here: there must be numbers left. Nobody follows us to
one beyond: it is a gap."""


class KvEventSource(Protocol):
    """What the publisher asks of a block pool. Both are cheap for what they return, and are called between
    steps."""

    block_size_tokens: int

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        """What has come and gone since the last call, net: at most twice the pool, however long ago that
        was."""
        ...

    def hashes(self) -> list[BlockHash]: ...


class KvEventPublisher:
    """Of one worker life. `run` goes on until it is cancelled; it is the only one who takes the pool's
    events."""

    def __init__(self, *, worker: WorkerRef, pool: KvEventSource, feed: KvEventFeed, ttl_s: float, rng: Random) -> None:
        """`ttl_s`: how long what was written outlives this worker."""
        self.worker = worker
        self.event_seq = 0
        """Of the last event that was written, or tried."""
        self.is_behind = True
        """The store does not have what this worker holds: it is away, or has not been told yet."""
        self.num_stored = 0
        self.num_evicted = 0
        self.num_resets = 0
        self._pool = pool
        self._feed = feed
        self._ttl_s = ttl_s
        self._renew_s = min(RENEW_S, ttl_s / 3)
        self._rng = rng
        self._woken = asyncio.Event()
        self._is_asked = False
        self._num_held = 0
        self._events_since_snapshot = 0
        self._hashes_since_snapshot = 0
        self._renew_at_s = 0.0

    def wake(self) -> None:
        """Blocks may have come or gone: call it after each step and pull. Costs nothing."""
        self._woken.set()

    def ask_snapshot(self) -> None:
        """A scheduler misses events (`CommandKind.SNAPSHOT`). However many ask, one is written."""
        self._is_asked = True
        self._woken.set()

    async def run(self) -> None:
        """Publish for ever. A store that is away is logged once, and again when it is back."""
        pause_s, is_away = FIRST_RETRY_S, False
        while True:
            try:
                await self._publish()
            except StoreUnavailable as error:
                if not is_away:
                    log.warning("kv_events_store_away", worker=str(self.worker), problem=str(error))
                self.is_behind = is_away = True
                await asyncio.sleep(pause_s * (0.5 + self._rng.random()))
                pause_s = min(2 * pause_s, MAX_RETRY_S)
                continue
            if is_away:
                log.info("kv_events_store_back", worker=str(self.worker), event_seq=self.event_seq)
            pause_s, is_away = FIRST_RETRY_S, False
            await self._next()

    async def _next(self) -> None:
        """Until there may be something to say, at least an interval."""
        await asyncio.sleep(INTERVAL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._renew_at_s):
                await self._woken.wait()
        self._woken.clear()

    async def _publish(self) -> None:
        """Bring the store up to date. Raises StoreUnavailable; then it has to be reset."""
        now_s = asyncio.get_running_loop().time()
        if self.is_behind or now_s >= self._renew_at_s:
            kept = await self._feed.renew(
                self.worker, self._ttl_s
            )  # cheap, where a snapshot to a store that is away is not
            self._renew_at_s = now_s + self._renew_s
            self.is_behind = self.is_behind or kept != self.event_seq
            if self.event_seq < kept < MAX_FOREIGN_SEQ:
                self.event_seq = kept  # not ours, but who followed it must see the RESET after it
        changes = [] if self.is_behind else self._take()
        if self.is_behind or len(changes) > max(self._num_held, MAX_EVENT_HASHES * EVENTS_A_WRITE):
            await self._reset()
        elif changes or self._is_asked:
            await self._write(list(self._events(changes)))

    async def _reset(self) -> None:
        self._take()
        self.event_seq += 1
        snapshot = self._snapshot()
        await self._feed.reset(snapshot, self._ttl_s)
        self.is_behind = False
        self.num_resets += 1

    async def _write(self, events: Sequence[KvEvent]) -> None:
        """In a few bounded calls, the last of them with a snapshot if one is due. The snapshot is as of now,
        like the events, whatever happens while this waits."""
        snapshot = self._snapshot() if self._is_due() else None
        last = max(0, len(events) - 1) // EVENTS_A_WRITE * EVENTS_A_WRITE
        for first in range(0, last, EVENTS_A_WRITE):
            await self._feed.publish(self.worker, events[first : first + EVENTS_A_WRITE], self._ttl_s)
        await self._feed.publish(self.worker, events[last:], self._ttl_s, snapshot)

    def _is_due(self) -> bool:
        return (
            self._is_asked
            or self._events_since_snapshot >= EVENTS_A_SNAPSHOT
            or self._hashes_since_snapshot >= max(HASHES_A_SNAPSHOT, self._num_held)
        )

    def _snapshot(self) -> KvSnapshot:
        """What is held as of `event_seq`: only right while no event of the pool is waiting to be taken."""
        held = tuple(self._pool.hashes())
        self._is_asked = False
        self._num_held, self._events_since_snapshot, self._hashes_since_snapshot = len(held), 0, 0
        return KvSnapshot(
            worker=self.worker,
            event_seq=self.event_seq,
            block_size_tokens=self._pool.block_size_tokens,
            hashes={Tier.DEVICE: held},
        )

    def _take(self) -> list[tuple[KvEventKind, BlockHash]]:
        changes = self._pool.take_events()
        num_evicted = sum(kind is KvEventKind.EVICTED for kind, _ in changes)
        self.num_evicted += num_evicted
        self.num_stored += len(changes) - num_evicted
        self._num_held += len(changes) - 2 * num_evicted
        self._hashes_since_snapshot += len(changes)
        return changes

    def _events(self, changes: Sequence[tuple[KvEventKind, BlockHash]]) -> Iterator[KvEvent]:
        """What has gone before what has come: then no reader ever counts more than the pool has."""
        for kind in (KvEventKind.EVICTED, KvEventKind.STORED):
            hashes = [block_hash for of, block_hash in changes if of is kind]
            for first in range(0, len(hashes), MAX_EVENT_HASHES):
                self.event_seq += 1
                self._events_since_snapshot += 1
                yield KvEvent(
                    worker=self.worker,
                    event_seq=self.event_seq,
                    kind=kind,
                    hashes=tuple(hashes[first : first + MAX_EVENT_HASHES]),
                    block_size_tokens=self._pool.block_size_tokens,
                )
