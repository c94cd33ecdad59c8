"""The metrics of each part, as one class a part over an injected registry, so that several services can live
in one process.

Names begin with `baton_` and end with their unit. A field of these classes is a Prometheus metric:
`metrics.running_seqs.set(n)`. A label has few values, whatever clients send; where these are workers, those
that are gone are taken away.
"""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import MetricWrapperBase

import baton

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""What `expose` returns, for the HTTP header."""

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TPOT_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
SHORT_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
PHASE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
REQUEST_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

M = TypeVar("M", bound=MetricWrapperBase)


def process_registry(service: str) -> CollectorRegistry:
    """A registry for a process of its own: what the operating system says of it (memory, CPU, file
    descriptors), and the version."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Gauge("baton_build_info", "The version that runs, as a label.", ("service", "version"), registry=registry).labels(
        service, baton.__version__
    ).set(1)
    return registry


def expose(registry: CollectorRegistry) -> bytes:
    """The registry's metrics in Prometheus's text format."""
    return generate_latest(registry)


class _Family:
    """Shorthands for declaring metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"baton_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"baton_{name}", text, labels, buckets=buckets, registry=self._registry)


class ProcessMetrics(_Family):
    """What every process has."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.loop_lag_s = self._histogram(
            "event_loop_lag_seconds",
            "How late the event loop ran a timer: up to 0.002 where nothing held it up.",
            SHORT_BUCKETS_S,
        )
        self.loop_tasks = self._gauge("event_loop_tasks", "Tasks of the event loop that have not ended.")
        self.trace_spans = self._counter(
            "trace_spans_total",
            "Spans that ended: sent, not_taken by the collector, dropped because too many waited for it.",
            "outcome",
        )
        for outcome in ("sent", "not_taken", "dropped"):
            self.trace_spans.labels(outcome)  # there from the start, so that the first one is an increase

    def look_at_loop(self, lag_s: float) -> None:
        """Called from the event loop now and then; `lag_s`: how late."""
        self.loop_lag_s.observe(lag_s)
        self.loop_tasks.set(len(asyncio.all_tasks()))


class GatewayMetrics(_Family):
    """What clients got."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.requests = self._counter(
            "requests_total", "Requests that ended, by endpoint, HTTP status and reason.", "endpoint", "code", "reason"
        )
        self.open_requests = self._gauge("open_requests", "Requests that have not ended.")
        self.attempts = self._counter(
            "attempts_total", "Attempts that failed and were placed again or given up, by reason.", "reason"
        )
        self.request_s = self._histogram(
            "request_seconds", "From a request's receipt to its last token.", REQUEST_BUCKETS_S
        )
        self.ttft_s = self._histogram("ttft_seconds", "From a request's receipt to its first token.", TTFT_BUCKETS_S)
        self.tpot_s = self._histogram("tpot_seconds", "Mean gap between a request's tokens.", TPOT_BUCKETS_S)
        self.phase_s = self._histogram(
            "request_phase_seconds",
            "Where the seconds of a request that ended well went: placement, queue, prefill, kv_exposed, admission, decode.",
            PHASE_BUCKETS_S,
            "phase",
        )
        self.promises = self._counter(
            "slo_attainment_total",
            "SLO terms of requests that ended well: kept or broken.",
            "term",
            "outcome",
        )
        self.pause_s = self._histogram(
            "resume_pause_seconds", "Gap between tokens around a lost worker.", TTFT_BUCKETS_S
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "Tokens of prompts.")
        self.cached_tokens = self._counter(
            "cached_tokens_total", "Tokens of prompts whose KV came from a prefix cache."
        )
        self.output_tokens = self._counter("output_tokens_total", "Tokens delivered to clients.")


class SchedulerMetrics(_Family):
    """What was decided."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.decisions = self._counter("decisions_total", "Placements made, by policy.", "policy")
        self.rejections = self._counter("rejections_total", "Requests refused before any prefill, by reason.", "reason")
        self.decision_s = self._histogram("decision_seconds", "Time to decide.", SHORT_BUCKETS_S)
        self.waiting_requests = self._gauge("waiting_requests", "Requests that wait at the scheduler for their turn.")
        self.waiting_s = self._histogram(
            "waiting_seconds", "Time at the scheduler of requests that waited there.", TTFT_BUCKETS_S
        )
        self.workers = self._gauge(
            "workers", "Workers with a living report stream, by role and state.", "role", "state"
        )
        self.store_degraded = self._gauge("store_degraded", "1 while Redis cannot be reached or lags behind.")
        self.kv_events_degraded = self._gauge(
            "kv_events_degraded", "1 while the prefix index cannot follow what workers hold."
        )
        self.prefix_index_claims = self._gauge(
            "prefix_index_claims", "Blocks in the prefix index, counted once a worker."
        )
        self.prefix_workers_behind = self._gauge("prefix_workers_behind", "Workers whose blocks have yet to be read.")
        self.prefix_tokens = self._counter(
            "prefix_hit_tokens_total",
            "Prompt tokens of placed requests that ended well: asked for, predicted to be found in a cache, actually found.",
            "kind",
        )
        self.predicted_over_actual = self._histogram(
            "predicted_over_actual_ratio",
            "Predicted seconds over actual ones, of TTFT and TPOT.",
            RATIO_BUCKETS,
            "term",
            "worker",
        )


class FleetMetrics(_Family):
    """Which workers there should be, and how far they are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.workers = self._gauge(
            "fleet_workers",
            "Workers that the fleet looks after, by role and state: waiting (for a node), starting, serving, failing.",
            "role",
            "state",
        )


class EngineMetrics(_Family):
    """What a worker computes, and where its blocks are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.info = self._gauge(
            "worker_info", "1; the labels say who this is, and in which life.", "worker", "role", "epoch"
        )
        self.blocks = self._gauge(
            "kv_blocks", "Blocks by tier and state: free, used, cached, receiving, quarantined.", "tier", "state"
        )
        self.blocks_held_for_others = self._gauge("kv_blocks_held_for_others", "Used blocks that only transfers pin.")
        self.running_seqs = self._gauge("running_seqs", "Sequences in the batch.")
        self.waiting_seqs = self._gauge("waiting_seqs", "Sequences waiting for their first step or for memory.")
        self.waiting_prefill_tokens = self._gauge("waiting_prefill_tokens", "Prompt tokens not computed yet.")
        self.step_s = self._histogram(
            "step_seconds", "Duration of a step on the device, without what lies between two.", TPOT_BUCKETS_S
        )
        self.step_tokens = self._counter("step_tokens_total", "Tokens computed.")
        self.preemptions = self._counter("preemptions_total", "Sequences that lost their blocks to others.")
        self.evictions = self._counter("evictions_total", "Cached blocks handed out again.")
        self.kv_publisher_behind = self._gauge(
            "kv_publisher_behind", "1 while Redis does not have what this worker holds."
        )
        self.kv_resets = self._counter("kv_resets_total", "Times that this worker told Redis anew all that it holds.")


class TransferMetrics(_Family):
    """How KV moves, as its reader and as its owner see it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.transfers = self._counter(
            "transfers_total", "Transfers that ended, by transport and outcome.", "transport", "outcome"
        )
        self.bytes = self._counter("transfer_bytes_total", "KV bytes read and proven.", "transport")
        self.duration_s = self._histogram(
            "transfer_seconds",
            "From the reader's first question to the last proven block, prefill included.",
            TTFT_BUCKETS_S,
            "transport",
        )
        self.read_s = self._counter(
            "transfer_read_seconds_total",
            "Seconds in which reads of a transfer ran; bytes over these is the speed.",
            "transport",
        )
        self.link_bytes_per_s = self._gauge(
            "link_bytes_per_second", "Measured speed of reading from a peer.", "peer", "transport"
        )
        self.broken_links = self._gauge(
            "broken_links", "Peers whose reads were given up and not probed successfully since."
        )
        self.open_leases = self._gauge("open_leases", "Transfers whose blocks are pinned here for a reader.")
        self.leases_ended = self._counter(
            "leases_ended_total", "Leases that ended: released, abandoned, expired, never_claimed.", "outcome"
        )
        self.validation_failures = self._counter(
            "proof_failures_total", "Blocks discarded, by what differed from KvReady.", "field"
        )
        for what in ("shape", "epoch", "life", "hash", "lease"):
            self.validation_failures.labels(what)  # there from the start, so that the first one is an increase
        self.dropped_notices = self._counter(
            "dropped_notices_total", "Late, repeated or unknown notices, by kind.", "kind"
        )
