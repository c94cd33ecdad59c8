"""Lets first reads of different peers run one at a time, so that lines of UCX's log belong to one peer."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.core.ids import ReadId

KeyT = TypeVar("KeyT", bound=Hashable)

MAX_ALONE_S = 1.0
"""Longest time that a running first read keeps others waiting, and that a read waits for all others together.
A silent peer therefore delays no read for long."""


@dataclass(slots=True)
class _FirstRead(Generic[KeyT]):
    """A running read of a key. is_alone: no read of another new key has run at the same time."""

    key: KeyT
    started_s: float
    is_alone: bool


class FirstReads(Generic[KeyT]):
    """Orders the reads of new keys: those from which no read has succeeded while it was alone.

    Used by one thread; the caller passes the time. A key is what UCX has a configuration for: a peer, and the
    kinds of memory at both ends. The number of held reads is limited by the readers' in-flight limits.
    """

    def __init__(self) -> None:
        self._known: set[KeyT] = set()
        self._running: dict[ReadId, _FirstRead[KeyT]] = {}
        self._held: deque[tuple[float, Callable[[], None]]] = deque()

    def begin(self, read_id: ReadId, key: KeyT, now_s: float, *, asked_s: float) -> bool:
        """Return True if this read may be posted now, else the caller passes it to `hold`.

        asked_s: when it was first tried; after `MAX_ALONE_S` it is not held any more
        """
        if key in self._known:
            return True
        others = [read for read in self._running.values() if read.key != key]
        if now_s < asked_s + MAX_ALONE_S and any(now_s < other.started_s + MAX_ALONE_S for other in others):
            return False
        for other in others:
            other.is_alone = False
        self._running[read_id] = _FirstRead(key, now_s, is_alone=not others)
        return True

    def is_first(self, read_id: ReadId) -> bool:
        """Return True if this read is the only one of a new key, so that a new window of the log begins."""
        return len(self._running) == 1 and read_id in self._running

    def hold(self, asked_s: float, post: Callable[[], None]) -> None:
        """Keep a read back until `due` yields it."""
        self._held.append((asked_s, post))

    def due(self, now_s: float) -> Iterator[Callable[[], None]]:
        """Yield reads that were held back, while they may begin."""
        for _held in range(len(self._held)):
            asked_s, post = self._held[0]
            is_busy = any(now_s < read.started_s + MAX_ALONE_S for read in self._running.values())
            if is_busy and now_s < asked_s + MAX_ALONE_S:
                return
            self._held.popleft()
            yield post

    def end(self, read_id: ReadId, *, is_done: bool) -> tuple[KeyT, bool] | None:
        """Record the end of a read.

        Returns the key and whether the read was alone, if it has succeeded and the key is new. After a read
        that was not alone the key stays new, so that its next read is tried alone.
        """
        read = self._running.pop(read_id, None)
        if read is None or not is_done or read.key in self._known:
            return None
        if read.is_alone:
            self._known.add(read.key)
        return read.key, read.is_alone

    def settle(self, key: KeyT) -> None:
        """Stop ordering the reads of a key, because its transport is known."""
        self._known.add(key)

    def forget(self, is_gone: Callable[[KeyT], bool]) -> None:
        """Drop what is known of keys that are not read any more."""
        self._known = {key for key in self._known if not is_gone(key)}
