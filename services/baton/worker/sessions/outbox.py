"""Messages to one gateway, numbered without gaps and kept until the gateway has acknowledged them."""

from collections import deque
from collections.abc import Iterator

from baton.core.errors import BatonError
from baton.core.messages.jobs import Heartbeat, JobFailure, Step
from baton.core.request import TokenDelta, TokenLogprobs

_MESSAGE_BYTES = 32
_DELTA_BYTES = 64
_TOKEN_BYTES = 8
_TIMELINE_BYTES = 160
_FAILURE_BYTES = 160


class OutboxFull(BatonError):
    """The gateway has left more unacknowledged than is kept for one; its session ends."""


class Outbox:
    """What a gateway may still ask for again. `next_seq` numbers the next message; `oldest_seq` is the first
    that is still here (equal to `next_seq` when all are acknowledged)."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: deque[tuple[Step | Heartbeat, int]] = deque()
        self.num_bytes = 0
        self.next_seq = 1

    @property
    def oldest_seq(self) -> int:
        return self._kept[0][0].seq if self._kept else self.next_seq

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, message: Step | Heartbeat) -> None:
        """Keep `message`, whose seq must be `next_seq`. Raises OutboxFull, keeping nothing new, when the
        limit in bytes would be passed."""
        if message.seq != self.next_seq:
            raise ValueError(f"message {message.seq} does not follow {self.next_seq - 1}")
        size = message_bytes(message)
        if self.num_bytes + size > self._limit_bytes:
            raise OutboxFull(
                f"{len(self._kept)} messages of {self.num_bytes} bytes are unacknowledged, {self._limit_bytes} are kept"
            )
        self._kept.append((message, size))
        self.num_bytes += size
        self.next_seq += 1

    def acknowledge(self, seq: int) -> None:
        """Forget messages up to `seq`. Late and repeated acknowledgements change nothing; of messages never
        sent, neither."""
        while self._kept and self._kept[0][0].seq <= seq:
            self.num_bytes -= self._kept.popleft()[1]

    def after(self, last_seq: int) -> Iterator[Step | Heartbeat]:
        """Kept messages that follow `last_seq`, oldest first."""
        return (message for message, _ in tuple(self._kept) if message.seq > last_seq)

    def can_resume(self, last_seq: int) -> bool:
        """Whether every message after `last_seq` is still here, and `last_seq` is one that was sent."""
        return self.oldest_seq - 1 <= last_seq < self.next_seq


def message_bytes(message: Step | Heartbeat) -> int:
    """About what the message takes in memory and on the wire; what matters is that it grows with tokens and
    logprobs."""
    if isinstance(message, Heartbeat):
        return _MESSAGE_BYTES
    return _MESSAGE_BYTES + sum(map(delta_bytes, message.deltas)) + sum(map(failure_bytes, message.failures))


def delta_bytes(delta: TokenDelta) -> int:
    size = _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + sum(map(_logprobs_bytes, delta.logprobs))
    return size + (_TIMELINE_BYTES if delta.timeline else 0)


def failure_bytes(failure: JobFailure) -> int:
    return _FAILURE_BYTES + len(failure.failure.message)


def _logprobs_bytes(logprobs: TokenLogprobs) -> int:
    return 2 * _TOKEN_BYTES * (1 + len(logprobs.top))
