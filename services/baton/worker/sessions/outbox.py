"""Keeps numbered messages to one gateway until it has acknowledged them."""

from collections import deque
from collections.abc import Iterator

from baton.core.errors import BatonError
from baton.core.messages.jobs import Heartbeat, JobFailure, Step
from baton.core.request import TokenDelta, TokenLogprobs

_MESSAGE_BYTES = 160
_DELTA_BYTES = 224
_TOKEN_BYTES = 36
_LOGPROB_BYTES = 128
_TIMELINE_BYTES = 320
_FAILURE_BYTES = 320
"""Memory of Python objects, measured with tracemalloc."""


class OutboxFull(BatonError):
    """The unacknowledged messages of a gateway exceed the limit in bytes. Its session ends."""


class Outbox:
    """The unacknowledged messages of one session, which a reconnecting gateway may request again.

    next_seq: number of the next message
    oldest_seq: number of the oldest message here; equal to `next_seq` if all are acknowledged
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._messages: deque[tuple[Step | Heartbeat, int]] = deque()
        self.num_bytes = 0
        self.next_seq = 1

    @property
    def oldest_seq(self) -> int:
        return self._messages[0][0].seq if self._messages else self.next_seq

    def __len__(self) -> int:
        return len(self._messages)

    def append(self, message: Step | Heartbeat) -> int:
        """Add `message`, whose seq must be `next_seq`. Returns its size in bytes.

        Raises OutboxFull without adding it if the limit is exceeded.
        """
        if message.seq != self.next_seq:
            raise ValueError(f"message {message.seq} does not follow {self.next_seq - 1}")
        size = message_bytes(message)
        if self.num_bytes + size > self._limit_bytes:
            raise OutboxFull(
                f"{len(self._messages)} messages of {self.num_bytes} bytes are unacknowledged; "
                f"the limit is {self._limit_bytes} bytes"
            )
        self._messages.append((message, size))
        self.num_bytes += size
        self.next_seq += 1
        return size

    def acknowledge(self, seq: int) -> None:
        """Drop messages up to `seq`. Late and repeated acknowledgements change nothing."""
        while self._messages and self._messages[0][0].seq <= seq:
            self.num_bytes -= self._messages.popleft()[1]

    def after(self, last_seq: int) -> Iterator[Step | Heartbeat]:
        """Return the messages after `last_seq`, oldest first."""
        return (message for message, _ in tuple(self._messages) if message.seq > last_seq)

    def can_resume(self, last_seq: int) -> bool:
        """Return True if `last_seq` was sent and every message after it is still here."""
        return self.oldest_seq - 1 <= last_seq < self.next_seq


def message_bytes(message: Step | Heartbeat) -> int:
    """Estimate the memory of a message in bytes. It grows with the number of tokens and logprobs."""
    if isinstance(message, Heartbeat):
        return _MESSAGE_BYTES
    return _MESSAGE_BYTES + sum(map(delta_bytes, message.deltas)) + sum(map(failure_bytes, message.failures))


def delta_bytes(delta: TokenDelta) -> int:
    """Estimate the memory of a token delta in bytes."""
    size = _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + sum(map(_logprobs_bytes, delta.logprobs))
    return size + (_TIMELINE_BYTES if delta.timeline else 0)


def failure_bytes(failure: JobFailure) -> int:
    """Estimate the memory of a failure in bytes."""
    return _FAILURE_BYTES + len(failure.failure.message)


def _logprobs_bytes(logprobs: TokenLogprobs) -> int:
    return _LOGPROB_BYTES * (1 + len(logprobs.top))
