"""Lets first reads of different peers run one at a time, so that lines of UCX's log belong to one peer."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from baton.core.ids import ReadId

KeyT = TypeVar("KeyT", bound=Hashable)

MAX_ALONE_S = 1.0
"""Time that a first read may keep others waiting. After it they begin, too, so that a silent peer delays none
for long."""


class FirstReads(Generic[KeyT]):
    """Orders the reads of keys from which no read has succeeded yet.

    Used by one thread; the caller passes the time. A key is what UCX has a configuration for: a peer, and the
    kinds of memory at both ends. The number of held reads is limited by the readers' in-flight limits.
    """

    def __init__(self) -> None:
        self._known: set[KeyT] = set()
        self._running: dict[ReadId, KeyT] = {}
        self._expires_s = 0.0
        self._is_alone = False
        self._held: deque[tuple[float, Callable[[], None]]] = deque()

    def begin(self, read_id: ReadId, key: KeyT, now_s: float, *, asked_s: float) -> bool:
        """Return True if this read may be posted now, else the caller passes it to `hold`.

        asked_s: when it was first tried; after `MAX_ALONE_S` it is not held any more
        """
        if key in self._known:
            return True
        others = any(other != key for other in self._running.values())
        if others and now_s < min(self._expires_s, asked_s + MAX_ALONE_S):
            return False
        if not self._running or others:
            self._is_alone, self._expires_s = not others, now_s + MAX_ALONE_S
        self._running[read_id] = key
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
            if self._running and now_s < min(self._expires_s, asked_s + MAX_ALONE_S):
                return
            self._held.popleft()
            yield post

    def end(self, read_id: ReadId, *, is_done: bool) -> tuple[KeyT, bool] | None:
        """Record the end of a read.

        Returns the key and whether it was alone, if this is the first read of the key that has succeeded.
        """
        key = self._running.pop(read_id, None)
        if key is None or not is_done or key in self._known:
            return None
        self._known.add(key)
        return key, self._is_alone

    def forget(self, is_gone: Callable[[KeyT], bool]) -> None:
        """Drop what is known of keys that are not read any more."""
        self._known = {key for key in self._known if not is_gone(key)}
