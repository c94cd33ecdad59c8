"""Tracing interface: spans of one request across all processes that handle it.

A request carries a trace context, a W3C `traceparent` as text; each service passes on the context of its own
span. This module does not depend on a tracing library and records nothing. If a collector is configured,
`baton.runtime.observability.otlp` provides spans that are exported.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from baton.core.errors import Reason, Refused

Kind: TypeAlias = Literal["server", "client"]
"""Kind of a span: it serves a call (`server`) or makes one (`client`)."""
Attributes: TypeAlias = Mapping[str, str | int | float | bool | None]
"""Attributes of a span; those with the value None are omitted."""

NOTHING: Attributes = {}

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def reason_of(error: BaseException) -> Reason:
    """Return the reason code of an error for spans, metrics and logs."""
    if isinstance(error, Refused):
        return error.failure.reason
    return Reason.CANCELLED if isinstance(error, asyncio.CancelledError) else Reason.INTERNAL


def is_traceparent(text: str) -> bool:
    """Return True if `text` is a valid W3C `traceparent`."""
    return _TRACEPARENT.fullmatch(text) is not None


class Span:
    """One timed operation of a trace; this base class records nothing.

    context: trace context to pass to other services. If nothing is recorded here, it is the received one.
    """

    __slots__ = ("context",)

    is_recorded = False
    """True if attributes and events are recorded, so that computing them is worthwhile."""

    def __init__(self, context: str = "") -> None:
        self.context = context

    def event(self, name: str, at_s: float, attributes: Attributes = NOTHING) -> None:
        """Add an event at `at_s` (loop time)."""

    def end(self, attributes: Attributes = NOTHING, *, problem: str = "", at_s: float | None = None) -> None:
        """End the span, now or at `at_s` (loop time).

        A `problem` marks it as failed. Only the first call has an effect.
        """


NO_SPAN = Span()


class Tracing:
    """Factory of spans; this base class creates spans that record nothing."""

    is_on = False

    def start(self, name: str, context: str = "", *, kind: Kind = "server", at_s: float | None = None) -> Span:
        """Start a span, now or at `at_s` (loop time), as a child of `context`.

        An empty or invalid context starts a new trace. Must be called on an event loop.
        """
        return Span(context) if context else NO_SPAN

    async def aclose(self) -> None:
        """Export the remaining spans, within a short time limit. Safe to call twice."""


OFF = Tracing()
