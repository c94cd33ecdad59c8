"""Output of a streamed response that its client has not read, and when the client counts as too slow.

A burst never makes a client slow: what one step brings for many samples may exceed the limit, as long as the
client reads it within the grace period. The memory of all streams together is bounded by the budget. If it is
exhausted, the stream with the most unread output is cut off, so a slow client cannot displace a fast one.
"""

from collections.abc import Callable

from baton.core.errors import Code, Failure, Reason, Refused
from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget

GRACE_S = 2.0
"""Time in which a client may have more output unread than its limit."""


class UnreadOutput:
    """Unread bytes of one stream. Close it when the stream has ended.

    `add` and `remove` may be called only on the event loop.
    """

    def __init__(self, streams: "UnreadStreams", on_cut: Callable[[Failure], None]) -> None:
        self._streams = streams
        self._on_cut = on_cut
        self._reservation = streams.budget.reserve(Account.UNSENT, 0, "unread output")
        self._above_limit_since_s: float | None = None
        self._failure: Failure | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are unread."""
        return self._reservation.num_bytes

    def add(self, num_bytes: int) -> None:
        """Count new output. Raises Refused (slow_reader) if the client is too slow."""
        if self._failure is not None:
            raise Refused(self._failure)
        while True:
            try:
                self._reservation.grow(num_bytes)
                break
            except OverBudget as error:
                largest = self._streams.largest(asking=self, num_bytes=num_bytes)
                failure = _slow_reader(f"{error}; this response has the most unread output; read faster")
                if largest is self:
                    raise Refused(failure) from error
                largest.cut(failure)
        self._check_limit()

    def remove(self, num_bytes: int) -> None:
        """Count output that was read. Output dropped by `cut` is already removed."""
        self._reservation.resize(max(0, self._reservation.num_bytes - num_bytes))
        if self._reservation.num_bytes <= self._streams.max_bytes:
            self._above_limit_since_s = None

    def cut(self, failure: Failure) -> None:
        """End the stream because of `failure` and release its bytes."""
        self._failure = failure
        self._reservation.release()
        self._on_cut(failure)

    def close(self) -> None:
        """Release the bytes of an ended stream."""
        self._reservation.release()
        self._streams.discard(self)

    def _check_limit(self) -> None:
        streams, now_s = self._streams, self._streams.clock()
        if self._reservation.num_bytes <= streams.max_bytes:
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
        self.budget = budget
        self.max_bytes = max_bytes
        self.clock = clock
        self.grace_s = grace_s
        self._open: set[UnreadOutput] = set()

    def open(self, on_cut: Callable[[Failure], None]) -> UnreadOutput:
        """Return the unread output of a new stream. `on_cut` is called if the stream is cut off."""
        output = UnreadOutput(self, on_cut)
        self._open.add(output)
        return output

    def largest(self, *, asking: UnreadOutput, num_bytes: int) -> UnreadOutput:
        """Return the stream with the most unread output, when `asking` needs `num_bytes` more."""
        return max(self._open, key=lambda one: (one.num_bytes + num_bytes * (one is asking), one is asking))

    def discard(self, output: UnreadOutput) -> None:
        """Forget an ended stream."""
        self._open.discard(output)


def _slow_reader(message: str) -> Failure:
    return Failure(code=Code.CANCELLED, reason=Reason.SLOW_READER, message=message)
