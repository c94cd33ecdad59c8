"""One direction of a message stream inside a process: bounded, in order, for one receiver."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from baton.core.errors import Failure, StreamBroken

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Whoever puts looks at `is_full` or waits for `room()` first; `get` waits for the next message.
    Cancelling `get` loses none."""

    __slots__ = ("_changed", "_end", "_max_messages", "_messages")

    def __init__(self, max_messages: int) -> None:
        if max_messages < 1:
            raise ValueError(f"a mailbox needs room for one message, not {max_messages}")
        self._max_messages = max_messages
        self._messages: deque[T] = deque()
        self._end: tuple[str, Failure | None] | None = None
        self._changed: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        return len(self._messages) >= self._max_messages

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    def put(self, message: T) -> None:
        """Append; after `close` nothing is kept."""
        if self._end is None:
            self._messages.append(message)
            self._notify()

    async def get(self) -> T:
        """The next message; after `close`, what was put before it and then StreamBroken, for ever."""
        while not self._messages:
            if self._end is not None:
                message, failure = self._end
                raise StreamBroken(message, failure)
            await self._change()
        taken = self._messages.popleft()
        if len(self._messages) == self._max_messages - 1:
            self._notify()
        return taken

    async def room(self) -> None:
        """Wait until a message can be put, or the mailbox has been closed."""
        while self.is_full and self._end is None:
            await self._change()

    def close(self, message: str, failure: Failure | None = None, *, discard: bool = False) -> None:
        """No more messages: `get` raises StreamBroken(message, failure) once those waiting are taken, or at
        once with `discard`. A second call changes no reason, but may still discard."""
        if self._end is None:
            self._end = (message, failure)
        if discard:
            self._messages.clear()
        self._notify()

    async def _change(self) -> None:
        """Receiver and sender share one future: whichever waits looks again."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _notify(self) -> None:
        if self._changed is not None:
            changed, self._changed = self._changed, None
            if not changed.done():
                changed.set_result(None)
