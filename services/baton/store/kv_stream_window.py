"""Decides which events of a KV event stream are kept, and how much memory a stream and its snapshot take."""

from collections import deque

from baton.core.kv.block_hash import HASH_BYTES
from baton.core.kv.kv_events import KvEvent, KvSnapshot

MAX_STREAM_BYTES = 4 * 2**20
"""Memory of the events that one stream keeps, without the snapshot."""
ENTRY_OVERHEAD_BYTES = 160
"""Memory that Redis needs for an event or a snapshot besides the hashes: fields, id, part of a node."""
ALLOCATOR_FACTOR = 1.25
"""Memory per requested byte: jemalloc rounds an allocation up by at most a quarter."""
STREAM_OVERHEAD_BYTES = 24 * 1024
"""Memory of a stream besides its kept events: keys, index of nodes, and one node that is kept in part."""


def event_bytes(event: KvEvent) -> int:
    """Return the memory of one event in a stream."""
    return _bytes_of(len(event.hashes))


def snapshot_bytes(snapshot: KvSnapshot) -> int:
    """Return the memory of a snapshot."""
    return _bytes_of(sum(len(hashes) for hashes in snapshot.hashes.values()))


def _bytes_of(num_hashes: int) -> int:
    return int((num_hashes * HASH_BYTES + ENTRY_OVERHEAD_BYTES) * ALLOCATOR_FACTOR)


class KvStreamWindow:
    """Tracks the events that one stream keeps: those after the last snapshot but one, within `max_bytes`.

    A reader of the last snapshot but one thus still finds the next event. A reader that is further behind
    sees a gap and reads the last snapshot. The last event is always kept.

    num_event_bytes, num_snapshot_bytes: memory of the kept events, and of the last snapshot
    """

    def __init__(self, max_bytes: int = MAX_STREAM_BYTES) -> None:
        self.num_event_bytes = 0
        self.num_snapshot_bytes = 0
        self._max_bytes = max_bytes
        self._kept: deque[tuple[int, int]] = deque()  # (event_seq, bytes)
        self._snapshot_seq = 0
        self._previous_snapshot_seq = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the stream and its snapshot."""
        return STREAM_OVERHEAD_BYTES + self.num_event_bytes + self.num_snapshot_bytes

    def append(self, event: KvEvent) -> None:
        """Add an event that is written."""
        self._kept.append((event.event_seq, event_bytes(event)))
        self.num_event_bytes += self._kept[-1][1]

    def replace_snapshot(self, snapshot: KvSnapshot) -> None:
        """Note that a snapshot is written in place of the last one."""
        self.num_snapshot_bytes = snapshot_bytes(snapshot)
        if snapshot.event_seq > self._snapshot_seq:
            self._previous_snapshot_seq, self._snapshot_seq = self._snapshot_seq, snapshot.event_seq

    def trim(self) -> int | None:
        """Drop events that are not kept. Returns the number of the first kept one, or None without a drop."""
        num_before = len(self._kept)
        while len(self._kept) > 1 and (
            self._kept[0][0] <= self._previous_snapshot_seq or self.num_event_bytes > self._max_bytes
        ):
            self.num_event_bytes -= self._kept.popleft()[1]
        return self._kept[0][0] if len(self._kept) < num_before else None
