"""Output of a streamed response that its client has not read, and when the client counts as too slow.

A burst never makes a client slow: what one step brings for many samples may exceed the limit, as long as the
client reads it within the grace period. The memory of all streams together is bounded by the budget. If it is
exhausted, the stream with the most unread output is cut off, so a slow client cannot displace a fast one.
"""

from collections.abc import Callable

from baton.core.errors import Code, Failure, Reason, Refused
from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget
from baton.runtime.process.shared_account import SharedAccount

GRACE_S = 2.0
"""Time in which a client may have more output unread than its limit."""


class UnreadOutput:
    """Unread bytes of one stream. Close it when the stream has ended.

    `add` and `remove` may be called only on the event loop.
    """

    def __init__(self, streams: "UnreadStreams", on_cut: Callable[[Failure], None]) -> None:
        self._streams = streams
        self._on_cut = on_cut
        self._buffer = streams.buffers.open(self._cut)
        self._above_limit_since_s: float | None = None
        self._failure: Failure | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are unread."""
        return self._buffer.num_bytes

    def add(self, num_bytes: int) -> None:
        """Count new output. Raises Refused (slow_reader) if the client is too slow."""
        if self._failure is not None:
            raise Refused(self._failure)
        try:
            self._buffer.add(num_bytes)
        except OverBudget as error:
            raise Refused(_most_unread(error)) from error
        self._check_limit()

    def remove(self, num_bytes: int) -> None:
        """Count output that was read. The output of a stream that was cut off is already removed."""
        self._buffer.remove(num_bytes)
        if self._buffer.num_bytes <= self._streams.max_bytes:
            self._above_limit_since_s = None

    def close(self) -> None:
        """Release the bytes of an ended stream, and the stream itself."""
        self._on_cut = _ignore
        self._buffer.close()

    def _cut(self, error: OverBudget) -> None:
        self._failure = _most_unread(error)
        self._on_cut(self._failure)

    def _check_limit(self) -> None:
        streams, now_s = self._streams, self._streams.clock()
        if self._buffer.num_bytes <= streams.max_bytes:
            self._above_limit_since_s = None
        elif self._above_limit_since_s is None:
            self._above_limit_since_s = now_s
        elif now_s - self._above_limit_since_s > streams.grace_s:
            raise Refused(
                _slow_reader(
                    f"more than {streams.max_bytes:,} bytes of the stream were unread for {streams.grace_s:g} s; "
                    "read faster"
                )
            )


class UnreadStreams:
    """The unread output of all streams of a gateway."""

    def __init__(
        self, budget: ByteBudget, *, max_bytes: int, clock: Callable[[], float], grace_s: float = GRACE_S
    ) -> None:
        """Create the set. `max_bytes` is the limit of one stream, which a burst may exceed for `grace_s`."""
        self.buffers = SharedAccount(budget, Account.UNSENT, "unread output")
        self.max_bytes = max_bytes
        self.clock = clock
        self.grace_s = grace_s

    def open(self, on_cut: Callable[[Failure], None]) -> UnreadOutput:
        """Return the unread output of a new stream. `on_cut` is called if the stream is cut off."""
        return UnreadOutput(self, on_cut)


def _ignore(failure: Failure) -> None:
    """Ignore that a closed stream is cut off."""


def _most_unread(error: OverBudget) -> Failure:
    return _slow_reader(f"{error}; this response has the most unread output; read faster")


def _slow_reader(message: str) -> Failure:
    return Failure(code=Code.CANCELLED, reason=Reason.SLOW_READER, message=message)
