"""Publishes which KV blocks this worker holds to the shared event log.

No step waits for it. The pool collects net changes until the publisher takes them. The stream of a worker
begins with RESET and a snapshot. Nothing is buffered while the store is unavailable. When it is available
again, or has lost data, the publisher writes RESET and a new snapshot.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from random import Random
from types import MappingProxyType
from typing import Protocol

from baton.core.errors import StoreUnavailable
from baton.core.ids import WorkerRef
from baton.core.interfaces import KvEventFeed
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import MAX_EVENT_HASHES, KvEvent, KvEventKind, KvSnapshot, Tier
from baton.runtime.logging import get_logger

log = get_logger(__name__)

INTERVAL_S = 0.02
"""Minimum interval between writes, so that one write covers several steps."""
RENEW_S = 1.0
"""Interval at which the publisher renews the stream's expiry and checks that the store has not lost it."""
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 0.5
EVENTS_PER_SNAPSHOT = 1_024
"""A snapshot is due after this many events. A stream keeps far more."""
HASHES_PER_SNAPSHOT = 16_384
"""A snapshot is also due after this many hashes, or as many as the worker holds if that is more. Snapshots
thus cost no more than the events themselves."""
EVENTS_PER_WRITE = 32
"""Events in one write to the store. With the largest events that is 256 KiB."""
NO_TIERS: Mapping[Tier, "KvEventSource"] = MappingProxyType({})
MAX_FOREIGN_SEQ = 2**62
"""Sequence numbers of another writer in the stream are continued if they are below this limit."""


class KvEventSource(Protocol):
    """The part of a block pool, or of a slower tier, that the publisher uses. Called between steps."""

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        """Return and clear the net changes of announced blocks: at most two per block of the pool."""
        ...

    def announced_hashes(self) -> list[BlockHash]:
        """Return the hashes of the blocks that the pool holds and has announced."""
        ...


class KvEventPool(KvEventSource, Protocol):
    """The part of a block pool that the publisher uses."""

    block_size_tokens: int


Change = tuple[Tier, KvEventKind, BlockHash]


class KvEventPublisher:
    """Publishes the KV events of one worker incarnation. It must be the only caller of `take_events`.

    event_seq: number of the last event that was written, or whose write was tried
    is_behind: the store does not have what this worker holds, because it is unavailable or not written yet
    """

    def __init__(
        self,
        *,
        worker: WorkerRef,
        pool: KvEventPool,
        feed: KvEventFeed,
        ttl_s: float,
        rng: Random,
        tiers: Mapping[Tier, KvEventSource] = NO_TIERS,
    ) -> None:
        """`ttl_s`: how long the written events outlive this worker, in seconds. `tiers`: beside the
        device."""
        self.worker = worker
        self.event_seq = 0
        self.is_behind = True
        self.num_stored = 0
        self.num_evicted = 0
        self.num_resets = 0
        self._sources: dict[Tier, KvEventSource] = {Tier.DEVICE: pool, **tiers}
        self._block_size_tokens = pool.block_size_tokens
        self._feed = feed
        self._ttl_s = ttl_s
        self._renew_s = min(RENEW_S, ttl_s / 3)
        self._rng = rng
        self._woken = asyncio.Event()
        self._is_snapshot_requested = False
        self._num_held = 0
        self._events_since_snapshot = 0
        self._hashes_since_snapshot = 0
        self._renew_at_s = 0.0

    def wake(self) -> None:
        """Publish soon, because blocks may have changed. Cheap; call it after each step and pull."""
        self._woken.set()

    def request_snapshot(self) -> None:
        """Write a snapshot soon, because a scheduler misses events. Several requests lead to one snapshot."""
        self._is_snapshot_requested = True
        self._woken.set()

    async def run(self) -> None:
        """Publish until cancelled. Logs once when the store becomes unavailable and once when it is back."""
        retry_s, is_unavailable = FIRST_RETRY_S, False
        while True:
            num_resets = self.num_resets
            try:
                await self._publish()
            except StoreUnavailable as error:
                if not is_unavailable:
                    log.warning(
                        "store_became_unavailable", use="kv_events", worker=str(self.worker), problem=str(error)
                    )
                self.is_behind = is_unavailable = True
                await asyncio.sleep(retry_s * (0.5 + self._rng.random()))
                retry_s = min(2 * retry_s, MAX_RETRY_S)
                continue
            if is_unavailable:
                log.info("store_recovered", use="kv_events", worker=str(self.worker), event_seq=self.event_seq)
            is_unavailable = False
            if self.num_resets == num_resets:
                retry_s = FIRST_RETRY_S  # a store that refuses events gets no reset at short intervals
            await self._wait_for_changes()

    async def _wait_for_changes(self) -> None:
        """Wait at least `INTERVAL_S`, then until `wake` was called or a renewal is due."""
        await asyncio.sleep(INTERVAL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._renew_at_s):
                await self._woken.wait()
        self._woken.clear()

    async def _publish(self) -> None:
        """Bring the store up to date. After StoreUnavailable the stream must be reset."""
        now_s = asyncio.get_running_loop().time()
        if self.is_behind or now_s >= self._renew_at_s:
            # Renewing is cheap, so it also checks that the store is available before a snapshot is built.
            stored_seq = await self._feed.renew(self.worker, self._ttl_s)
            self._renew_at_s = now_s + self._renew_s
            self.is_behind = self.is_behind or stored_seq != self.event_seq
            if self.event_seq < stored_seq < MAX_FOREIGN_SEQ:
                # Another writer added entries. The RESET must come after them for readers to see it.
                self.event_seq = stored_seq
        changes = [] if self.is_behind else self._take()
        if self.is_behind or len(changes) > max(self._num_held, MAX_EVENT_HASHES * EVENTS_PER_WRITE):
            await self._reset()
        elif changes or self._is_snapshot_requested:
            await self._write(list(self._events(changes)))

    async def _reset(self) -> None:
        self._take()
        self.event_seq += 1
        snapshot = self._snapshot()
        await self._feed.reset(snapshot, self._ttl_s)
        self.is_behind = False
        self.num_resets += 1

    async def _write(self, events: Sequence[KvEvent]) -> None:
        """Write events in bounded calls; the last call includes a snapshot if one is due.

        The snapshot is taken before the first call, so it matches the events even if blocks change meanwhile.
        """
        snapshot = self._snapshot() if self._is_snapshot_due() else None
        last = max(0, len(events) - 1) // EVENTS_PER_WRITE * EVENTS_PER_WRITE
        for first in range(0, last, EVENTS_PER_WRITE):
            await self._feed.publish(self.worker, events[first : first + EVENTS_PER_WRITE], self._ttl_s)
        await self._feed.publish(self.worker, events[last:], self._ttl_s, snapshot)

    def _is_snapshot_due(self) -> bool:
        return (
            self._is_snapshot_requested
            or self._events_since_snapshot >= EVENTS_PER_SNAPSHOT
            or self._hashes_since_snapshot >= max(HASHES_PER_SNAPSHOT, self._num_held)
        )

    def _snapshot(self) -> KvSnapshot:
        """Return what is held as of `event_seq`. Only valid right after the pool's events were taken."""
        held = {tier: tuple(source.announced_hashes()) for tier, source in self._sources.items()}
        self._is_snapshot_requested = False
        self._num_held = sum(map(len, held.values()))
        self._events_since_snapshot = self._hashes_since_snapshot = 0
        return KvSnapshot(
            worker=self.worker,
            event_seq=self.event_seq,
            block_size_tokens=self._block_size_tokens,
            hashes=held,
        )

    def _take(self) -> list[Change]:
        changes = [
            (tier, kind, block_hash)
            for tier, source in self._sources.items()
            for kind, block_hash in source.take_events()
        ]
        num_evicted = sum(kind is KvEventKind.EVICTED for _, kind, _ in changes)
        self.num_evicted += num_evicted
        self.num_stored += len(changes) - num_evicted
        self._num_held += len(changes) - 2 * num_evicted
        self._hashes_since_snapshot += len(changes)
        return changes

    def _events(self, changes: Sequence[Change]) -> Iterator[KvEvent]:
        """Yield evictions before additions, so that a reader never counts more blocks than a tier has."""
        for tier, kind in product(self._sources, (KvEventKind.EVICTED, KvEventKind.STORED)):
            hashes = [block_hash for of_tier, of_kind, block_hash in changes if (of_tier, of_kind) == (tier, kind)]
            for first in range(0, len(hashes), MAX_EVENT_HASHES):
                self.event_seq += 1
                self._events_since_snapshot += 1
                yield KvEvent(
                    worker=self.worker,
                    event_seq=self.event_seq,
                    kind=kind,
                    tier=tier,
                    hashes=tuple(hashes[first : first + MAX_EVENT_HASHES]),
                    block_size_tokens=self._block_size_tokens,
                )
