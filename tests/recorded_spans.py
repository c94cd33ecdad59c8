"""Tracing that records spans in memory, for tests in virtual time and tests of a single service."""

import asyncio
from itertools import count

from baton.runtime.observability.tracing import NOTHING, Attributes, Kind, Span, Tracing

TRACE = "0123456789abcdef" * 2


class RecordedSpan(Span):
    """A recorded span. `parent`: the context that it was started with. Times are those of the event loop."""

    is_recorded = True

    def __init__(self, name: str, context: str, parent: str, kind: Kind, started_s: float) -> None:
        super().__init__(context)
        self.name = name
        self.parent = parent
        self.kind = kind
        self.started_s = started_s
        self.ended_s: float | None = None
        self.attributes: dict[str, object] = {}
        self.events: list[tuple[str, float]] = []
        self.problem = ""

    def event(self, name: str, at_s: float, attributes: Attributes = NOTHING) -> None:
        self.events.append((name, at_s))

    def end(self, attributes: Attributes = NOTHING, *, problem: str = "", at_s: float | None = None) -> None:
        assert self.ended_s is None, f"{self.name} ended twice"
        self.attributes = {name: value for name, value in attributes.items() if value is not None}
        self.problem = problem
        self.ended_s = asyncio.get_running_loop().time() if at_s is None else at_s


class RecordedTracing(Tracing):
    is_on = True

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []
        self._ids = count(1)

    def start(self, name: str, context: str = "", *, kind: Kind = "server", at_s: float | None = None) -> Span:
        started_s = asyncio.get_running_loop().time() if at_s is None else at_s
        span = RecordedSpan(name, f"00-{TRACE}-{next(self._ids):016x}-01", context, kind, started_s)
        self.spans.append(span)
        return span

    def named(self, name: str) -> list[RecordedSpan]:
        return [span for span in self.spans if span.name == name]

    def only(self, name: str) -> RecordedSpan:
        (span,) = self.named(name)
        return span
