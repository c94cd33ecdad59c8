"""Spans that reach a collector: OpenTelemetry's SDK and its OTLP exporter over gRPC, behind
`runtime.observability.tracing`.

Imported only where a collector was named. Spans wait in a bounded queue for a thread of the SDK's that sends
them; what does not fit is dropped, and counted. A collector that is away costs a log line when that begins,
and one when it ends.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as OpenSpan
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter

import baton
from baton.runtime.logging import get_logger
from baton.runtime.observability.tracing import NOTHING, Attributes, Kind, Span, Tracing

log = get_logger(__name__)

MAX_WAITING_SPANS = 2048
"""Some hundred requests' spans, one to two KiB each."""
BATCH_SPANS = 512
SEND_EVERY_S = 1.0
SEND_S = 5.0
"""A collector that has not taken a batch by then is not asked again for that batch."""
FLUSH_S = 2.0
"""How long a process that ends waits for its last spans to be taken."""

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_PARENTS = TraceContextTextMapPropagator()


class OtlpTracing(Tracing):
    """Of one process. `sample`: the part of traces that is recorded, of those that begin here; who began a
    trace elsewhere has decided. `spans`: counts those that have ended, by `ProcessMetrics.trace_spans`'
    outcomes."""

    is_on = True

    def __init__(
        self,
        endpoint: str,
        sample: float,
        spans: Counter,
        *,
        service: str,
        instance: str,
        attributes: Attributes = NOTHING,
    ) -> None:
        logging.getLogger("opentelemetry").setLevel(
            logging.CRITICAL
        )  # a line for each batch; `_Told` says what there is to say
        resource = Resource.create(
            {
                "service.namespace": "baton",
                "service.name": f"baton-{service}",
                "service.instance.id": instance,
                "service.version": baton.__version__,
                **_known(attributes),
            }
        )
        self._exporter = OTLPSpanExporter(endpoint, timeout=SEND_S)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(_Queue(_Told(self._exporter, endpoint, spans), spans))
        self._tracer = self._provider.get_tracer("baton", baton.__version__)
        self._is_closed = False

    def start(self, name: str, context: str = "", *, kind: Kind = "server", at_s: float | None = None) -> Span:
        now_ns = time.time_ns()
        wall_less_loop_ns = now_ns - round(asyncio.get_running_loop().time() * 1e9)
        began_ns = now_ns if at_s is None else round(at_s * 1e9) + wall_less_loop_ns
        made = self._tracer.start_span(
            name,
            _PARENTS.extract({"traceparent": context}, Context()),
            kind=_KINDS[kind],
            start_time=began_ns,
        )
        ids = made.get_span_context()
        onward = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
        return _OtlpSpan(made, onward, began_ns, wall_less_loop_ns) if made.is_recording() else Span(onward)

    async def aclose(self) -> None:
        """In a thread that nobody waits for longer than `FLUSH_S`: what sends may be stuck in a call to a
        collector that says nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(None))

        threading.Thread(target=shut_down, name="traces-flush", daemon=True).start()
        await asyncio.wait((done,), timeout=FLUSH_S)
        self._exporter.shutdown()  # ends the call that may still be under way


class _OtlpSpan(Span):
    """A recorded one. Times of the loop are told as wall time by what the two differed at its start; the
    loop's clock stands still for some milliseconds at a time, so nothing is told to be before the start."""

    __slots__ = ("_began_ns", "_span", "_wall_less_loop_ns")

    is_recorded = True

    def __init__(self, span: OpenSpan, context: str, began_ns: int, wall_less_loop_ns: int) -> None:
        super().__init__(context)
        self._span = span
        self._began_ns = began_ns
        self._wall_less_loop_ns = wall_less_loop_ns

    def event(self, name: str, at_s: float, attributes: Attributes = NOTHING) -> None:
        self._span.add_event(name, _known(attributes), self._wall_ns(at_s))

    def end(self, attributes: Attributes = NOTHING, *, problem: str = "", at_s: float | None = None) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes(_known(attributes))
        if problem:
            self._span.set_status(Status(StatusCode.ERROR, problem))
        self._span.end(max(self._began_ns, time.time_ns()) if at_s is None else self._wall_ns(at_s))

    def _wall_ns(self, at_s: float) -> int:
        return max(self._began_ns, round(at_s * 1e9) + self._wall_less_loop_ns)


class _Queue(BatchSpanProcessor):
    """The SDK's, which would drop its oldest span for one that finds it full, and tell nobody: here that one
    is dropped, and counted. Spans end on the event loop alone."""

    def __init__(self, told: "_Told", spans: Counter) -> None:
        super().__init__(
            told,
            max_queue_size=MAX_WAITING_SPANS,
            max_export_batch_size=BATCH_SPANS,
            schedule_delay_millis=SEND_EVERY_S * 1000,
        )
        self._told = told
        self._dropped = spans.labels("dropped")
        self._num_taken = 0

    def on_end(self, span: ReadableSpan) -> None:
        if (
            self._num_taken - self._told.num_seen >= MAX_WAITING_SPANS
        ):  # no fewer than wait, since a span is seen after it has left
            self._dropped.inc()
            return
        self._num_taken += 1
        super().on_end(span)


class _Told(SpanExporter):
    """Says when spans begin to be lost, and when they get through again. Called by the sending thread
    alone."""

    def __init__(self, inner: SpanExporter, endpoint: str, spans: Counter) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._sent, self._not_taken = spans.labels("sent"), spans.labels("not_taken")
        self._is_losing = False
        self._num_lost = 0
        self.num_seen = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_seen += len(spans)
        problem = "the collector does not take them"
        try:
            result = self._inner.export(spans)
        except Exception as error:  # the SDK would only log it, each time
            result, problem = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        (self._sent if result is SpanExportResult.SUCCESS else self._not_taken).inc(len(spans))
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            if not self._is_losing:
                log.warning("traces_lost", endpoint=self._endpoint, problem=problem)
        elif self._is_losing:
            log.info("traces_taken_again", endpoint=self._endpoint, num_lost=self._num_lost)
            self._num_lost = 0
        self._is_losing = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _known(attributes: Attributes) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in attributes.items() if value is not None}
