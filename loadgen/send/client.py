"""Interface of a protocol client: it sends an `ResolvedRequest` and fills in an `Exchange` as the response
arrives.

Sending and receiving are plain calls, not coroutines: at thousands of events per second, one task per request
costs more than the request itself. An exchange never raises. Every error is recorded in it, and `on_end` is
called exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadgen.send.timers import DueCheck, now_s
from loadgen.slo_target import SloTarget

Messages = Sequence[Mapping[str, str]]
"""Chat messages with `role` and `content`."""
NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """One request with its prompt resolved to exactly one of token ids, a text or chat messages."""

    index: int
    token_ids: Sequence[int] = ()
    text: str = ""
    messages: Messages = ()
    max_tokens: int = 16
    ignore_eos: bool = True
    priority: int = 0
    session: str = ""
    slo: SloTarget = field(default_factory=SloTarget)


class Exchange:
    """One request in flight and what has been received for it so far. Times are `now_s()`.

    `status`, `reason` and the other result fields are those of `records.Record`. `not_sent` is true if this
    machine could not send the request, for lack of file descriptors or ports.
    """

    __slots__ = (
        "_abort",
        "_timer",
        "cancel_at",
        "counts",
        "ended_s",
        "endpoint",
        "error",
        "finish_reason",
        "index",
        "is_complete",
        "left_early",
        "not_sent",
        "num_cached_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "on_end",
        "reason",
        "request_id",
        "retry_after_s",
        "sent_s",
        "status",
        "texts",
        "timed_out",
        "timeline",
        "times",
        "token_ids",
    )

    def __init__(self, index: int, on_end: Callable[[Exchange], None], cancel_after_tokens: int | None = None) -> None:
        self.index = index
        self.on_end: Callable[[Exchange], None] | None = on_end
        self.cancel_at = NEVER if cancel_after_tokens is None else cancel_after_tokens
        self.sent_s: float | None = None
        self.ended_s: float | None = None
        self.times: list[float] = []
        self.counts: list[int] = []
        self.num_tokens = 0
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.status: int | None = None
        self.reason = ""
        self.error = ""
        self.finish_reason = ""
        self.is_complete = False
        self.left_early = False
        self.timed_out = False
        self.not_sent = False
        self.retry_after_s: float | None = None
        self.num_prompt_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        self.num_output_tokens: int | None = None
        self.request_id = ""
        self.endpoint = ""
        self.timeline: Mapping[str, Any] | None = None
        self._abort: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        """True once the exchange has ended, for whatever reason."""
        return self.ended_s is not None

    @property
    def is_successful(self) -> bool:
        """True if the response ended properly and without an error."""
        return self.is_complete and not self.error

    def start_timeout(
        self, loop: asyncio.AbstractEventLoop, timeout_s: float, clock: Callable[[], float] = now_s
    ) -> None:
        """Start the client timeout."""
        if not self.is_over:
            self._timer = loop.call_later(timeout_s, self._time_out, timeout_s, clock)

    # Called by the protocol client.

    def set_abort(self, abort: Callable[[], None]) -> None:
        """Set the function that aborts the request at the protocol level.

        It is called if the exchange ends before the response.
        """
        self._abort = abort

    def add_tokens(self, at_s: float, num_tokens: int) -> None:
        """Record that a message with `num_tokens` tokens arrived.

        Cancels the request if `cancel_at` tokens have been received.
        """
        self.times.append(at_s)
        self.counts.append(num_tokens)
        self.num_tokens += num_tokens
        if self.num_tokens >= self.cancel_at:
            self.cancel(at_s)

    def end(self, at_s: float) -> None:
        """Mark the exchange as ended. Only the first call has an effect."""
        on_end, self.on_end = self.on_end, None
        if on_end is None:
            return
        self.ended_s = at_s
        self._abort = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        on_end(self)

    def fail(self, at_s: float, error: str, *, reason: str = "", status: int | None = None) -> None:
        """End the exchange with an error. Other fields must be set before."""
        if self.is_over:
            return
        self.error = error
        self.reason = reason or self.reason
        self.status = self.status if status is None else status
        self._close(at_s)

    # Called by the load generator.

    def cancel(self, at_s: float) -> None:
        """Cancel the request on purpose."""
        if not self.is_over:
            self.left_early = True
            self._close(at_s)

    def _time_out(self, timeout_s: float, clock: Callable[[], float]) -> None:
        if not self.is_over:
            self.timed_out = True
            self.error = f"no complete response within {timeout_s:g} s"
            self._close(clock())

    def _close(self, at_s: float) -> None:
        abort, self._abort = self._abort, None
        if abort is not None:
            abort()
        self.end(at_s)


class Client(Protocol):
    """A connection to one server, or to several that are used in turn by request index.

    It belongs to one event loop. `due_check` is checked after each received message, before it is processed.
    """

    due_check: DueCheck

    async def open(self) -> None:
        """Connect to every endpoint. Raises Unreachable if one cannot be reached."""

    def prepare(self, request: ResolvedRequest) -> Any:
        """Return the encoded request for `send`.

        All work that can be done early is done here. It may take milliseconds.
        """

    def send(self, prepared: Any, exchange: Exchange) -> None:
        """Send a prepared request now, without waiting for anything."""

    def preconnect(self, num_requests: int, at_most: int) -> bool:
        """Open connections for `num_requests` requests that are due soon, at most `at_most` in this call.

        Returns True if more connections are still needed. Called some hundred times a second.
        """

    async def aclose(self) -> None:
        """Close all connections and cancel what is in flight."""


async def send_once(client: Client, request: ResolvedRequest, timeout_s: float) -> Exchange:
    """Send one request outside of a schedule and return its exchange when it has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_end(_: Exchange) -> None:
        if not ended.done():
            ended.set_result(None)

    exchange = Exchange(request.index, on_end)
    try:
        exchange.start_timeout(loop, timeout_s)
        client.send(client.prepare(request), exchange)
        await ended
    finally:
        exchange.cancel(now_s())
    return exchange
