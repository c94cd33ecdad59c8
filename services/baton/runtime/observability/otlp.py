"""Exports spans to a collector with OpenTelemetry's SDK and its OTLP exporter over gRPC.

Implements `runtime.observability.tracing`; imported only if a collector is configured. Spans wait in a
bounded queue for a sender thread of the SDK. Spans that do not fit are dropped and counted. An unreachable
collector causes one log line when it begins and one when it ends.
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

MAX_QUEUED_SPANS = 2048
"""Maximum number of spans waiting for export: those of some hundred requests, 1 to 2 KiB each."""
BATCH_SPANS = 512
SEND_EVERY_S = 1.0
SEND_S = 5.0
"""Timeout of one batch, which is not sent again."""
FLUSH_S = 2.0
"""Time that a process waits for the export of its last spans before it ends."""

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_PARENTS = TraceContextTextMapPropagator()


class OtlpTracing(Tracing):
    """Tracing of one process that exports its spans.

    sample: share of the traces started here that are recorded. A received context carries its own decision.
    spans: counter of ended spans with the outcomes of `ProcessMetrics.trace_spans`.
    """

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
        # the SDK would log a line for each failed batch; `_CountingExporter` logs changes only
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create(
            {
                "service.namespace": "baton",
                "service.name": f"baton-{service}",
                "service.instance.id": instance,
                "service.version": baton.__version__,
                **_without_none(attributes),
            }
        )
        self._exporter = OTLPSpanExporter(endpoint, timeout=SEND_S)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(_BoundedQueue(_CountingExporter(self._exporter, endpoint, spans), spans))
        self._tracer = self._provider.get_tracer("baton", baton.__version__)
        self._is_closed = False

    def start(self, name: str, context: str = "", *, kind: Kind = "server", at_s: float | None = None) -> Span:
        now_ns = time.time_ns()
        clock_offset_ns = now_ns - round(asyncio.get_running_loop().time() * 1e9)
        start_ns = now_ns if at_s is None else round(at_s * 1e9) + clock_offset_ns
        span = self._tracer.start_span(
            name,
            _PARENTS.extract({"traceparent": context}, Context()),
            kind=_KINDS[kind],
            start_time=start_ns,
        )
        ids = span.get_span_context()
        traceparent = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
        return _OtlpSpan(span, traceparent, start_ns, clock_offset_ns) if span.is_recording() else Span(traceparent)

    async def aclose(self) -> None:
        """Export the remaining spans for at most `FLUSH_S`.

        The flush runs in its own daemon thread, because the sender may be blocked in a call to a collector
        that does not answer.
        """
        if self._is_closed:
            return
        self._is_closed = True
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(None))

        threading.Thread(target=shut_down, name="traces-flush", daemon=True).start()
        await asyncio.wait((done,), timeout=FLUSH_S)
        self._exporter.shutdown()  # cancels a call that is still in progress


class _OtlpSpan(Span):
    """Recorded span, which converts loop time to wall time with the clock offset measured at its start.

    The loop's clock may be some milliseconds behind, so no time is reported before the start.
    """

    __slots__ = ("_clock_offset_ns", "_span", "_start_ns")

    is_recorded = True

    def __init__(self, span: OpenSpan, context: str, start_ns: int, clock_offset_ns: int) -> None:
        super().__init__(context)
        self._span = span
        self._start_ns = start_ns
        self._clock_offset_ns = clock_offset_ns

    def event(self, name: str, at_s: float, attributes: Attributes = NOTHING) -> None:
        self._span.add_event(name, _without_none(attributes), self._wall_ns(at_s))

    def end(self, attributes: Attributes = NOTHING, *, problem: str = "", at_s: float | None = None) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes(_without_none(attributes))
        if problem:
            self._span.set_status(Status(StatusCode.ERROR, problem))
        self._span.end(max(self._start_ns, time.time_ns()) if at_s is None else self._wall_ns(at_s))

    def _wall_ns(self, at_s: float) -> int:
        return max(self._start_ns, round(at_s * 1e9) + self._clock_offset_ns)


class _BoundedQueue(BatchSpanProcessor):
    """Queue of ended spans that drops and counts a new span if it is full.

    The SDK's queue would silently drop its oldest span. Spans end only on the event loop.
    """

    def __init__(self, exporter: "_CountingExporter", spans: Counter) -> None:
        super().__init__(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            max_export_batch_size=BATCH_SPANS,
            schedule_delay_millis=SEND_EVERY_S * 1000,
        )
        self._counting_exporter = exporter
        self._dropped = spans.labels("dropped")
        self._num_queued = 0

    def on_end(self, span: ReadableSpan) -> None:
        # an upper bound of the queue's length, because a span is counted as seen after it has left the queue
        if self._num_queued - self._counting_exporter.num_seen >= MAX_QUEUED_SPANS:
            self._dropped.inc()
            return
        self._num_queued += 1
        super().on_end(span)


class _CountingExporter(SpanExporter):
    """Exporter that counts spans and logs when exports begin to fail and when they succeed again.

    Called only by the sender thread.
    """

    def __init__(self, inner: SpanExporter, endpoint: str, spans: Counter) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._sent, self._failed = spans.labels("sent"), spans.labels("failed")
        self._is_failing = False
        self._num_lost = 0
        self.num_seen = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_seen += len(spans)
        problem = "the collector did not accept the spans"
        try:
            result = self._inner.export(spans)
        except Exception as error:  # the SDK would log it for every batch
            result, problem = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        (self._sent if result is SpanExportResult.SUCCESS else self._failed).inc(len(spans))
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            if not self._is_failing:
                log.warning("trace_export_failed", endpoint=self._endpoint, problem=problem)
        elif self._is_failing:
            log.info("trace_export_recovered", endpoint=self._endpoint, num_lost=self._num_lost)
            self._num_lost = 0
        self._is_failing = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _without_none(attributes: Attributes) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in attributes.items() if value is not None}
