"""Bounded in-process queue of one stream direction, with an end and its reason."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from baton.core.errors import Failure, StreamBroken

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Bounded FIFO for one receiver, which can be closed with a reason.

    A sender checks `is_full` or awaits `wait_for_space` before `put`. Cancelling `get` loses no message.
    num_bytes: bytes of the messages, as far as the sender tells them.
    """

    __slots__ = ("_changed", "_end", "_max_bytes", "_max_messages", "_messages", "num_bytes")

    def __init__(self, max_messages: int, max_bytes: int | None = None) -> None:
        """Create a queue that is full at `max_messages`, or when it has `max_bytes` or more."""
        if max_messages < 1:
            raise ValueError(f"max_messages is {max_messages}; must be at least 1")
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[tuple[T, int]] = deque()
        self.num_bytes = 0
        self._end: tuple[str, Failure | None] | None = None
        self._changed: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """True if no message should be put now."""
        has_max_bytes = self._max_bytes is not None and self.num_bytes >= self._max_bytes
        return has_max_bytes or len(self._messages) >= self._max_messages

    @property
    def has_ended(self) -> bool:
        """True after `close`."""
        return self._end is not None

    def put(self, message: T, num_bytes: int = 0) -> None:
        """Append a message; after `close` it is dropped."""
        if self._end is None:
            self._messages.append((message, num_bytes))
            self.num_bytes += num_bytes
            self._notify()

    async def get(self) -> T:
        """Return the next message. Raises StreamBroken after `close`, once earlier messages are consumed."""
        while not self._messages:
            if self._end is not None:
                message, failure = self._end
                raise StreamBroken(message, failure)
            await self._wait_for_change()
        was_full = self.is_full
        taken, num_bytes = self._messages.popleft()
        self.num_bytes -= num_bytes
        if was_full and not self.is_full:
            self._notify()
        return taken

    async def wait_for_space(self) -> None:
        """Wait until a message can be put, or the mailbox is closed."""
        while self.is_full and self._end is None:
            await self._wait_for_change()

    def close(self, message: str, failure: Failure | None = None, *, discard: bool = False) -> None:
        """End the stream: `get` raises StreamBroken(message, failure) after the remaining messages.

        With `discard` the remaining messages are dropped. A second call does not change the reason, but may
        still discard.
        """
        if self._end is None:
            self._end = (message, failure)
        if discard:
            self._messages.clear()
            self.num_bytes = 0
        self._notify()

    async def _wait_for_change(self) -> None:
        """Wait until messages or state have changed. Receiver and sender share one future and recheck."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _notify(self) -> None:
        if self._changed is not None:
            changed, self._changed = self._changed, None
            if not changed.done():
                changed.set_result(None)
