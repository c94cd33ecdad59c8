"""What a client of a server is to the rest of loadgen: it takes an `Ask`, and fills in an `Exchange` as the
answer comes.

Sending and receiving are plain calls, no coroutines: at some thousand events a second a task a request would
cost more than the request. Nothing raises out of an exchange; whatever goes wrong is a fact in it, and
`on_end` is called once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadgen.send.timers import Urgent, now_s
from loadgen.slo_target import SloTarget

Messages = Sequence[Mapping[str, str]]
"""A chat: objects with `role` and `content`."""
NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, with its prompt resolved: token ids, a text, or a chat (exactly one)."""

    index: int
    token_ids: Sequence[int] = ()
    text: str = ""
    messages: Messages = ()
    max_tokens: int = 16
    ignore_eos: bool = True
    priority: int = 0
    slo: SloTarget = field(default_factory=SloTarget)


class Exchange:
    """One request on its way: what has been seen of it so far. Times are `now_s()`.

    `status`, `reason`, … are as in `records.Record`. `not_sent`: this machine was the obstacle (file
    descriptors, ports), not the server.
    """

    __slots__ = (
        "_hang_up",
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
        self._hang_up: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its proper end."""
        return self.is_complete and not self.error

    def limit(self, loop: asyncio.AbstractEventLoop, timeout_s: float, clock: Callable[[], float] = now_s) -> None:
        """The client's patience, from now on."""
        if not self.is_over:
            self._timer = loop.call_later(timeout_s, self._time_out, timeout_s, clock)

    # The client's side.

    def on_hang_up(self, hang_up: Callable[[], None]) -> None:
        """How to let go of the server when this ends before its answer does."""
        self._hang_up = hang_up

    def got(self, at_s: float, num_tokens: int) -> None:
        """A message brought so many tokens."""
        self.times.append(at_s)
        self.counts.append(num_tokens)
        self.num_tokens += num_tokens
        if self.num_tokens >= self.cancel_at:
            self.leave(at_s)

    def end(self, at_s: float) -> None:
        """Nothing more comes. Only the first end counts."""
        on_end, self.on_end = self.on_end, None
        if on_end is None:
            return
        self.ended_s = at_s
        self._hang_up = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        on_end(self)

    def fail(self, at_s: float, error: str, *, reason: str = "", status: int | None = None) -> None:
        """It went wrong. What else is known of it has been set before."""
        if self.is_over:
            return
        self.error = error
        self.reason = reason or self.reason
        self.status = self.status if status is None else status
        self._let_go(at_s)

    # The user's side.

    def leave(self, at_s: float) -> None:
        """The client goes away, on purpose."""
        if not self.is_over:
            self.left_early = True
            self._let_go(at_s)

    def _time_out(self, timeout_s: float, clock: Callable[[], float]) -> None:
        if not self.is_over:
            self.timed_out = True
            self.error = f"no whole answer within {timeout_s:g} s"
            self._let_go(clock())

    def _let_go(self, at_s: float) -> None:
        hang_up, self._hang_up = self._hang_up, None
        if hang_up is not None:
            hang_up()
        self.end(at_s)


class Client(Protocol):
    """One way to a server, or to several that take turns by the request's index. It belongs to one event
    loop. `urgent`: it looks there whenever a message has come, before it does anything else with it."""

    urgent: Urgent

    async def open(self) -> None:
        """Raises Unreachable if an endpoint cannot be reached."""

    def prepare(self, ask: Ask) -> Any:
        """Everything that can be done before its time: the result is for `send`. May take milliseconds."""

    def send(self, prepared: Any, exchange: Exchange) -> None:
        """Off it goes, now. Returns at once."""

    def expect(self, num_requests: int, at_most: int) -> bool:
        """So many will be sent within the next moments: make ready for them, in at most so many steps.
        Whether that was not enough. Called some hundred times a second."""

    async def aclose(self) -> None:
        """Lets go of everything."""


async def ask_once(client: Client, ask: Ask, timeout_s: float) -> Exchange:
    """One request outside of a schedule."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_end(_: Exchange) -> None:
        if not ended.done():
            ended.set_result(None)

    exchange = Exchange(ask.index, on_end)
    try:
        exchange.limit(loop, timeout_s)
        client.send(client.prepare(ask), exchange)
        await ended
    finally:
        exchange.leave(now_s())
    return exchange
