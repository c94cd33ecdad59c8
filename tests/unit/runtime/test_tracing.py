"""Trace spans: creation, export, sampling and loss, and no overhead while tracing is off."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from baton.core.errors import ConfigError
from baton.runtime.config.settings import GatewayConfig
from baton.runtime.config.shared_settings import TracingSettings
from baton.runtime.observability import otlp
from baton.runtime.observability.metrics import ProcessMetrics
from baton.runtime.observability.open_tracing import open_tracing
from baton.runtime.observability.otlp import MAX_QUEUED_SPANS, OtlpTracing
from baton.runtime.observability.tracing import NO_SPAN, OFF, is_traceparent
from tests.otlp_collector import Collector

SHORT_FLUSH_S = 0.5
TRACE, SPAN = "ab" * 16, "cd" * 8
CONTEXT = f"00-{TRACE}-{SPAN}-01"


@pytest_asyncio.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """A collector in this process, which gets enough time for each batch and for the last spans."""
    monkeypatch.setattr(otlp, "SEND_S", 60.0)
    monkeypatch.setattr(otlp, "FLUSH_S", 60.0)
    collector = Collector()
    await collector.start()
    yield collector
    await collector.stop()


def process_metrics() -> ProcessMetrics:
    return ProcessMetrics(CollectorRegistry())


def tracing_to(endpoint: str, sample: float = 1.0, metrics: ProcessMetrics | None = None) -> OtlpTracing:
    spans = (metrics or process_metrics()).trace_spans
    return OtlpTracing(
        endpoint, sample, spans, service="gateway", instance="g0", attributes={"baton.role": "x", "baton.nothing": None}
    )


def span_outcomes(metrics: ProcessMetrics) -> dict[str, float]:
    """Return the number of spans by outcome."""
    return {
        s.labels["outcome"]: s.value
        for family in metrics.trace_spans.collect()
        for s in family.samples
        if s.name.endswith("_total")
    }


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        (CONTEXT, True),
        (f"01-{TRACE}-{SPAN}-00", True),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (CONTEXT.upper(), False),
        (CONTEXT + "-more", False),
        (CONTEXT + "\n", False),
        ("", False),
    ],
)
def test_traceparent_is_validated(text: str, is_valid: bool) -> None:
    assert is_traceparent(text) is is_valid


def test_tracing_without_a_collector_records_no_spans_and_passes_contexts_on() -> None:
    tracing = open_tracing(GatewayConfig(), process_metrics(), "gateway", "g0")
    assert tracing is OFF
    assert not tracing.is_on
    assert tracing.start("request") is NO_SPAN
    span = tracing.start("request", CONTEXT)
    span.event("something", 1.0)
    span.end({"baton.outcome": "finished"}, problem="none", at_s=2.0)
    assert (span.context, span.is_recorded) == (CONTEXT, False)


def test_services_import_the_exporter_only_with_tracing_on() -> None:
    code = (
        "import json, sys\n"
        "import baton.gateway.gateway_main, baton.scheduler.scheduler_main, baton.worker.worker_main\n"
        "print(json.dumps([name for name in sys.modules if name.startswith(('baton.runtime.observability.otlp', "
        "'opentelemetry.exporter'))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []  # redis imports the SDK itself


async def test_span_reaches_the_collector_with_attributes_events_and_times(collector: Collector) -> None:
    metrics = process_metrics()
    assert span_outcomes(metrics) == {"sent": 0, "failed": 0, "dropped": 0}
    tracing = open_tracing(
        TracingSettings(otlp_endpoint=collector.endpoint), metrics, "worker", "d0", {"baton.role": "decode"}
    )
    now_s = asyncio.get_running_loop().time()
    outer = tracing.start("decode", CONTEXT, at_s=now_s - 2.0)
    inner = tracing.start("kv pull", outer.context, kind="client")
    inner.end({"baton.bytes": 3, "baton.transport": None}, problem="transfer_timeout", at_s=now_s + 0.5)
    outer.event("first token", now_s - 1.0)
    outer.end({"baton.outcome": "finished"}, at_s=now_s)
    outer.end({"baton.outcome": "too late"})
    await tracing.aclose()
    await tracing.aclose()
    spans = collector.of_trace(TRACE)
    assert spans.keys() == {"decode", "kv pull"}
    assert span_outcomes(metrics) == {"sent": 2, "failed": 0, "dropped": 0}
    decode, pull = spans["decode"], spans["kv pull"]
    assert (decode.parent_id, pull.parent_id) == (SPAN, decode.span_id)
    assert outer.context == f"00-{TRACE}-{decode.span_id}-01"
    assert (decode.service, decode.instance) == ("baton-worker", "d0")
    assert (decode.attributes, decode.problem) == ({"baton.outcome": "finished"}, "")
    assert (pull.attributes, pull.problem) == ({"baton.bytes": 3}, "transfer_timeout")
    assert decode.end_s - decode.start_s == pytest.approx(2.0, abs=1e-6)
    assert decode.end_s - decode.events["first token"] == pytest.approx(1.0, abs=1e-6)


async def test_spans_never_end_before_their_start(collector: Collector) -> None:
    """The loop's clock is updated once per iteration, so its times may be before the span's start."""
    tracing = tracing_to(collector.endpoint)
    for _ in range(50):
        span = tracing.start("placement")
        span.event("something", asyncio.get_running_loop().time() - 0.01)
        span.end()
    late = tracing.start("kv pull")
    late.end(at_s=asyncio.get_running_loop().time() - 1.0)
    await tracing.aclose()
    assert len(collector.spans) == 51
    assert all(span.start_s <= min(span.events.values(), default=span.end_s) <= span.end_s for span in collector.spans)


async def test_span_without_a_valid_parent_context_starts_a_new_trace(collector: Collector) -> None:
    tracing = tracing_to(collector.endpoint)
    for context in ("", "garbage", f"00-{'0' * 32}-{SPAN}-01"):
        tracing.start("request", context).end()
    await tracing.aclose()
    assert [span.parent_id for span in collector.spans] == ["", "", ""]
    assert len({span.trace_id for span in collector.spans}) == 3


async def test_sampling_is_decided_by_the_first_span_of_a_trace(collector: Collector) -> None:
    tracing = tracing_to(collector.endpoint, sample=0.0)
    own = tracing.start("request")
    below = tracing.start("placement", own.context)
    elsewhere = tracing.start("request", CONTEXT)
    for span in (own, below, elsewhere):
        span.end()
    await tracing.aclose()
    assert [span.trace_id for span in collector.spans] == [TRACE]
    assert not own.is_recorded
    assert not below.is_recorded
    assert is_traceparent(own.context)
    assert not int(own.context[-2:], 16) & 1
    assert below.context.split("-")[1] == own.context.split("-")[1]


async def test_sample_rate_is_the_recorded_share_of_traces(collector: Collector) -> None:
    tracing = tracing_to(collector.endpoint, sample=0.25)
    recorded = sum(tracing.start("request").is_recorded for _ in range(2000))
    await tracing.aclose()
    assert 380 < recorded < 620  # six standard deviations


@pytest.mark.parametrize("is_running", [False, True])
async def test_unavailable_collector_delays_neither_spans_nor_shutdown(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    """The collector is either stopped, or accepts calls and never answers, which would take 30 s."""
    monkeypatch.setattr(otlp, "FLUSH_S", SHORT_FLUSH_S)
    loop = asyncio.get_running_loop()
    collector.answers = False
    if not is_running:
        await collector.stop()
    tracing = tracing_to(collector.endpoint)
    start_s = loop.time()
    for _ in range(2 * MAX_QUEUED_SPANS):
        tracing.start("request").end()
    assert loop.time() - start_s < 20.0
    start_s = loop.time()
    await tracing.aclose()
    assert loop.time() - start_s < SHORT_FLUSH_S + 20.0


@pytest.mark.slow
async def test_spans_beyond_the_queue_limit_are_counted_and_queued_ones_are_sent(collector: Collector) -> None:
    metrics = process_metrics()
    collector.answers = False
    tracing = tracing_to(collector.endpoint, metrics=metrics)
    tracing.start("first").end()  # a single one, so that no part of a batch can stay in the queue
    await collector.until(lambda: collector.num_calls == 1)
    for _ in range(MAX_QUEUED_SPANS):
        tracing.start("queued").end()
    assert span_outcomes(metrics)["dropped"] == 0
    for _ in range(3):
        tracing.start("dropped").end()
    assert span_outcomes(metrics) == {"sent": 0, "failed": 0, "dropped": 3}
    collector.answers = True
    collector.refuse_waiting()  # as if the first call, and only that, had timed out
    await collector.until(lambda: len(collector.spans) == MAX_QUEUED_SPANS)
    assert {span.name for span in collector.spans} == {"queued"}
    tracing.start("after the queue was sent").end()
    await tracing.aclose()
    assert span_outcomes(metrics) == {"sent": MAX_QUEUED_SPANS + 1, "failed": 1, "dropped": 3}


@pytest.mark.parametrize(
    "url", ["collector:4317", "grpc://c:4317", "http://c", "http://:4317", "http://c:x", "http://c:4318/v1/traces", ""]
)
def test_invalid_endpoint_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint: expected http://HOST:PORT"):
        GatewayConfig(otlp_endpoint=url)


@pytest.mark.parametrize("settings", [{"trace_sample": 1.1}, {"trace_sample": -0.1}])
def test_sample_rate_outside_0_to_1_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="trace_sample"):
        GatewayConfig(**settings)
