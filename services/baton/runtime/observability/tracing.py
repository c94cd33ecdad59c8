"""Traces: what one request waited for, over all processes that it met. Spans are made at the services' seams,
and cost nothing while off.

What a service does on somebody's behalf comes with that one's context, a W3C `traceparent` as plain text, and
goes on with its own. Nothing here knows a library: where the settings name a collector,
`baton.runtime.observability.otlp` makes spans that reach it.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from baton.core.errors import Reason, Refused

Kind: TypeAlias = Literal["server", "client"]
"""Of a span: somebody else's question is answered, or somebody else is asked."""
Attributes: TypeAlias = Mapping[str, str | int | float | bool | None]
"""What is known of a span. None: not known, and left out."""

NOTHING: Attributes = {}

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def reason_of(error: BaseException) -> Reason:
    """The word that spans, metrics and logs have for what ended something."""
    if isinstance(error, Refused):
        return error.failure.reason
    return Reason.CANCELLED if isinstance(error, asyncio.CancelledError) else Reason.INTERNAL


def is_traceparent(text: str) -> bool:
    """Whether it is a context that somebody can go on from."""
    return _TRACEPARENT.fullmatch(text) is not None


class Span:
    """One thing that was done, from its start to its end; this one is not recorded. `context` goes with
    whatever is asked of others because of it: they go on from it, or, where nothing is recorded here, from
    what came in."""

    __slots__ = ("context",)

    is_recorded = False
    """Whether it is worth finding out what to say of it."""

    def __init__(self, context: str = "") -> None:
        self.context = context

    def event(self, name: str, at_s: float, attributes: Attributes = NOTHING) -> None:
        """Something happened in it, at that time of the event loop."""

    def end(self, attributes: Attributes = NOTHING, *, problem: str = "", at_s: float | None = None) -> None:
        """It is over, now or at `at_s` (loop time); with a `problem` it has failed. Only the first end
        counts."""


NO_SPAN = Span()


class Tracing:
    """Makes spans; this one none."""

    is_on = False

    def start(self, name: str, context: str = "", *, kind: Kind = "server", at_s: float | None = None) -> Span:
        """Begin a span, now or at `at_s` (loop time), below the one whose context it is; without one, or with
        one that is none, it begins a trace. Called on an event loop."""
        return Span(context) if context else NO_SPAN

    async def aclose(self) -> None:
        """Send what is not sent yet, for a short while at most. Safe to call twice."""


OFF = Tracing()
