"""Computes one snapshot a second while somebody watches, and gives it to all viewers."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager

from baton.runtime.logging import get_logger

log = get_logger(__name__)

MAX_VIEWERS = 256
INTERVAL_S = 1.0


class TooManyViewers(Exception):
    """Raised if `MAX_VIEWERS` watch already."""


def event(name: str, value: object) -> bytes:
    """Return one server-sent event with a JSON value."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


async def _nothing_to_prepare() -> None:
    return


class LiveFeed:
    """The snapshots of one gateway. Nothing is computed while nobody watches. Used from one event loop."""

    def __init__(
        self,
        snapshot: Callable[[], object],
        history: Callable[[], object],
        prepare: Callable[[], Awaitable[None]] = _nothing_to_prepare,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Create a feed without viewers.

        snapshot: returns a snapshot; called once per interval.
        history: returns what only new viewers need; called at most once per interval.
        prepare: awaited before each snapshot but the first.
        """
        self._snapshot = snapshot
        self._history = history
        self._prepare = prepare
        self._interval_s = interval_s
        self._current = b""
        self._first: tuple[int, bytes] = (0, b"")
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.num_viewers = 0
        self.num_computed = 0

    async def watch(self) -> AsyncGenerator[bytes]:
        """Yield the history and a snapshot, and then each new snapshot. Viewers that fall behind miss some.

        Ends when the feed is closed. Raises TooManyViewers.
        """
        with self._as_viewer():
            seen = self.num_computed
            yield self._first_event() + self._current
            while not self._is_closed:
                if seen == self.num_computed:
                    await self._changed.wait()
                if seen != self.num_computed:
                    seen = self.num_computed
                    yield self._current

    async def aclose(self) -> None:
        """Stop computing, and end the feeds of all viewers."""
        self._is_closed = True
        self._changed.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    @contextmanager
    def _as_viewer(self) -> Iterator[None]:
        if self.num_viewers >= MAX_VIEWERS:
            raise TooManyViewers
        self.num_viewers += 1
        try:
            if self._task is None:
                self._compute()
                self._task = asyncio.create_task(self._run(), name="live-view")
            yield
        finally:
            self.num_viewers -= 1
            if not self.num_viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._prepare()
                self._compute()
            except Exception:  # the view must not stop for all because of one value
                log.exception("live_snapshot_failed")

    def _compute(self) -> None:
        self._current = event("snapshot", self._snapshot())
        self.num_computed += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _first_event(self) -> bytes:
        """Return the history, which viewers that begin in one interval share."""
        if self._first[0] != self.num_computed:
            self._first = self.num_computed, event("history", self._history())
        return self._first[1]
