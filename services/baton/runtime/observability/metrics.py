"""Declares the Prometheus metrics of each service, as one class per component.

The registry is injected, so that several services can run in one process. Each field of these classes is a
metric: `metrics.running_seqs.set(n)`. Names begin with `baton_` and end with their unit. Label values are
bounded, regardless of what clients send; series of workers that are gone are removed.
"""

import asyncio
import collections
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import MetricWrapperBase

import baton
from baton.runtime.process.byte_budget import ByteBudget

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Content type of the result of `expose`."""

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TPOT_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
SHORT_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
STALL_BUCKETS_S = (0.05, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
PHASE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
REQUEST_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

M = TypeVar("M", bound=MetricWrapperBase)


def process_registry(service: str) -> CollectorRegistry:
    """Create the registry of a service process, with memory, CPU, file descriptors and the version."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Gauge(
        "baton_build_info", "Always 1; the labels are service and version.", ("service", "version"), registry=registry
    ).labels(service, baton.__version__).set(1)
    return registry


def expose(registry: CollectorRegistry) -> bytes:
    """Return the registry's metrics in Prometheus text format."""
    return generate_latest(registry)


class _Family:
    """Base class with helpers that declare metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"baton_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"baton_{name}", text, labels, buckets=buckets, registry=self._registry)


class ProcessMetrics(_Family):
    """Metrics of every process: event loop and trace export."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.loop_lag_s = self._histogram(
            "event_loop_lag_seconds",
            "Delay of a timer on the event loop; up to 0.002 on an idle loop.",
            SHORT_BUCKETS_S,
        )
        self.loop_stall_s = self._histogram(
            "event_loop_stall_seconds",
            "Time of a stall of the event loop, beyond 0.2 s. Peers do not count as silent during it.",
            STALL_BUCKETS_S,
        )
        self.loop_tasks = self._gauge(
            "event_loop_tasks", "Running tasks of the event loop, by the function that each one runs.", "function"
        )
        self._functions: set[str] = set()  # those with a time series
        self.trace_spans = self._counter(
            "trace_spans_total",
            "Ended trace spans by outcome: sent, failed (export failed), dropped (the queue was full).",
            "outcome",
        )
        for outcome in ("sent", "failed", "dropped"):
            self.trace_spans.labels(outcome)  # created now, so that the first event is an increase

    def observe_loop(self, lag_s: float, stall_s: float) -> None:
        """Record the delay of a timer, the part of it that is a stall, and the number of tasks.

        Call it periodically on the event loop.
        """
        self.loop_lag_s.observe(lag_s)
        if stall_s:
            self.loop_stall_s.observe(stall_s)
        counts = collections.Counter(_function_of(task) for task in asyncio.all_tasks())
        for function in self._functions - counts.keys():
            self.loop_tasks.remove(function)
        for function, number in counts.items():
            self.loop_tasks.labels(function).set(number)
        self._functions = set(counts)


def _function_of(task: asyncio.Task[object]) -> str:
    """Return the qualified name of the coroutine function that a task runs."""
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", type(coroutine).__name__)


class BudgetMetrics(_Family):
    """Metrics of the memory budget of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._used = self._gauge(
            "memory_budget_used_bytes", "Memory that requests hold in this process, by account.", "account"
        )
        self._limit = self._gauge(
            "memory_budget_limit_bytes", "Memory that requests may hold in this process, by account.", "account"
        )

    def follow(self, budget: ByteBudget) -> None:
        """Export all accounts of a budget."""
        for account, limit_bytes in budget.limits.items():
            self._used.labels(account.value).set_function(partial(budget.used, account))
            self._limit.labels(account.value).set(limit_bytes)


class GatewayMetrics(_Family):
    """Metrics of a gateway: requests, latency and SLO attainment."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.requests = self._counter(
            "requests_total", "Ended requests by endpoint, HTTP status and reason.", "endpoint", "code", "reason"
        )
        self.ignored_fields = self._counter(
            "ignored_fields_total",
            "Unknown request fields that were ignored, by name; names after the first 64 count as other.",
            "field",
        )
        self.open_requests = self._gauge("open_requests", "Requests that have not ended.")
        self.attempts = self._counter("attempts_total", "Failed attempts by reason; most are placed again.", "reason")
        self.request_s = self._histogram(
            "request_seconds", "Time from the receipt of a request to its last token.", REQUEST_BUCKETS_S
        )
        self.ttft_s = self._histogram(
            "ttft_seconds", "Time from the receipt of a request to its first token.", TTFT_BUCKETS_S
        )
        self.tpot_s = self._histogram("tpot_seconds", "Mean time between two tokens of a request.", TPOT_BUCKETS_S)
        self.phase_s = self._histogram(
            "request_phase_seconds",
            "Time of completed requests by phase: placement, queue, prefill, kv_exposed, admission, decode.",
            PHASE_BUCKETS_S,
            "phase",
        )
        slo_text = "SLO terms (ttft, tpot) of completed requests by outcome: met or missed."
        self.slo_attainment = self._counter("slo_attainment_total", slo_text, "term", "outcome")
        self.pause_s = self._histogram(
            "resume_pause_seconds",
            "Time between two tokens of a request that lost its worker in between.",
            TTFT_BUCKETS_S,
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens.")
        self.cached_tokens = self._counter(
            "cached_tokens_total", "Prompt tokens whose KV was reused from a prefix cache."
        )
        self.output_tokens = self._counter("output_tokens_total", "Tokens delivered to clients.")
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a completed request.", TOKEN_BUCKETS
        )
        self.request_output_tokens = self._histogram(
            "request_output_tokens", "Output tokens of a completed request, over its samples.", TOKEN_BUCKETS
        )
        self.longest_sample_tokens = self._histogram(
            "longest_sample_tokens", "Output tokens of the longest sample of a completed request.", TOKEN_BUCKETS
        )
        self.request_max_tokens = self._histogram(
            "request_max_tokens", "Limit of a completed request for the tokens of a sample.", TOKEN_BUCKETS
        )
        self.request_n = self._histogram("request_n", "Samples of a completed request.", CHOICE_BUCKETS)
        self.finished_samples = self._counter(
            "finished_samples_total",
            "Samples of completed requests by finish reason: stop, length, tool_calls.",
            "reason",
        )
        for reason in ("stop", "length", "tool_calls"):
            self.finished_samples.labels(reason)  # created now, so that the first event is an increase


class GrammarMetrics(_Family):
    """Metrics of a gateway's checks of grammars."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.checks = self._counter(
            "grammar_checks_total",
            "Checks by outcome: known (a result was kept), valid, invalid, too_expensive (of time or memory), "
            "timeout (the request waited too long), queue_full, unavailable (no compiler could be started).",
            "outcome",
        )
        for outcome in ("known", "valid", "invalid", "too_expensive", "timeout", "queue_full", "unavailable"):
            self.checks.labels(outcome)
        self.compile_s = self._histogram(
            "grammar_compile_seconds", "Time to compile a grammar that was not known.", SHORT_BUCKETS_S
        )
        self.waiting = self._gauge("grammar_checks_waiting", "Grammars in the queue of the compiler.")
        self.compiler_deaths = self._counter(
            "grammar_compiler_deaths_total", "Ends of the process that compiles grammars; it is then started again."
        )


class SchedulerMetrics(_Family):
    """Metrics of a scheduler: decisions, queue, prefix index and prediction error."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.decisions = self._counter("decisions_total", "Placements by policy.", "policy")
        self.rejections = self._counter("rejections_total", "Requests refused by the scheduler, by reason.", "reason")
        self.decision_s = self._histogram("decision_seconds", "Time to decide about one request.", SHORT_BUCKETS_S)
        self.queued_requests = self._gauge("scheduler_queued_requests", "Requests queued at the scheduler.")
        self.queued_s = self._histogram(
            "scheduler_queue_seconds", "Time in the scheduler's queue, of requests that were queued.", TTFT_BUCKETS_S
        )
        self.workers = self._gauge("workers", "Connected workers by role and state.", "role", "state")
        self.store_degraded = self._gauge(
            "store_degraded", "1 while decision records cannot be written to Redis fast enough, else 0."
        )
        self.kv_events_degraded = self._gauge(
            "kv_events_degraded", "1 while the prefix index cannot read the workers' block events, else 0."
        )
        self.prefix_index_blocks = self._gauge(
            "prefix_index_blocks",
            "Announced blocks in the prefix index; a block is counted once per worker that holds it.",
        )
        self.prefix_index_workers_behind = self._gauge(
            "prefix_index_workers_behind", "Workers whose block events are not completely in the prefix index."
        )
        self.prefix_tokens = self._counter(
            "prefix_hit_tokens_total",
            "Prompt tokens of completed requests by kind: asked (all), predicted to be cached, actual (found cached).",
            "kind",
        )
        self.predicted_over_actual = self._histogram(
            "predicted_over_actual_ratio",
            "Predicted divided by actual seconds, for TTFT and TPOT.",
            RATIO_BUCKETS,
            "term",
            "worker",
        )


class FleetMetrics(_Family):
    """Metrics of the fleet: its workers by state."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.workers = self._gauge(
            "fleet_workers",
            "Workers that the fleet manages, by role and state: waiting (for a node), starting, serving, failing.",
            "role",
            "state",
        )


class EngineMetrics(_Family):
    """Metrics of a worker's engine and KV cache."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.info = self._gauge(
            "worker_info", "Always 1; the labels are the worker's id, role and epoch.", "worker", "role", "epoch"
        )
        self.blocks = self._gauge(
            "kv_blocks", "KV blocks by tier and state: free, used, cached, receiving, quarantined.", "tier", "state"
        )
        self.retained_blocks = self._gauge(
            "kv_retained_blocks", "Cached KV blocks that clients have asked to retain, within their budgets.", "tier"
        )
        self.blocks_held_for_others = self._gauge(
            "kv_blocks_held_for_others", "Used KV blocks that are pinned only by transfers to other workers."
        )
        self.running_seqs = self._gauge("running_seqs", "Sequences in the running batch.")
        self.waiting_seqs = self._gauge("waiting_seqs", "Sequences waiting for their first step or for free blocks.")
        self.waiting_prefill_tokens = self._gauge("waiting_prefill_tokens", "Prompt tokens that are not computed yet.")
        self.step_s = self._histogram(
            "step_seconds", "Duration of one step on the device, without gaps between steps.", TPOT_BUCKETS_S
        )
        self.step_tokens = self._counter("step_tokens_total", "Tokens computed in steps.")
        self.preemptions = self._counter("preemptions_total", "Sequences preempted because no blocks were free.")
        self.preempted_tokens = self._counter("preempted_tokens_total", "Tokens whose KV preempted sequences had.")
        self.recomputed_tokens = self._counter(
            "recomputed_tokens_total",
            "Those of them that were in no cache when the sequence was admitted again, and that were computed again.",
        )
        self.draft_tokens = self._counter(
            "draft_tokens_total",
            "Draft tokens that decode steps have verified, by drafter: ngram, suffix, grammar, model.",
            "drafter",
        )
        self.accepted_draft_tokens = self._counter(
            "accepted_draft_tokens_total",
            "Draft tokens that became output, by drafter; divided by draft_tokens_total it is their acceptance.",
            "drafter",
        )
        self.evictions = self._counter("evictions_total", "Cached blocks evicted for reuse.")
        self.kv_publisher_behind = self._gauge(
            "kv_publisher_behind", "1 while Redis lacks some of this worker's block events, else 0."
        )
        self.kv_resets = self._counter(
            "kv_resets_total", "Times this worker replaced its block list in Redis by a new snapshot."
        )


class TierMetrics(_Family):
    """Metrics of a worker's slower KV tiers. They stay 0 without one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.copied_blocks = self._counter(
            "tier_blocks_total", "KV blocks copied to a slower tier (store) or back (load).", "tier", "direction"
        )
        self.copied_bytes = self._counter("tier_bytes_total", "Bytes of these copies.", "tier", "direction")
        self.copy_s = self._counter(
            "tier_copy_seconds_total",
            "Seconds of these copies; tier_bytes_total divided by it is the speed.",
            "tier",
            "direction",
        )
        self.failed_copies = self._counter("tier_failed_copies_total", "Copies that raised an error.", "tier")
        self.invalid_blocks = self._counter(
            "tier_invalid_blocks_total",
            "Loaded KV blocks whose generation, hash or checksum was not the expected one. They were not used.",
            "tier",
        )
        self.disk_defects = self._counter(
            "disk_kv_defects_total",
            "Content of the KV file that was not used, or could not be written, by what was wrong with it.",
            "defect",
        )
        self.reloaded_tokens = self._counter(
            "reloaded_tokens_total", "Tokens of prompts whose KV was reloaded from a slower tier instead of computed."
        )
        self.reloads = self._counter("reloads_total", "Reloads by outcome: complete, incomplete.", "outcome")
        self.preemptions_by_way = self._counter(
            "preemptions_by_way_total",
            "Preempted sequences by the way their KV was predicted to come back faster: recompute, reload.",
            "way",
        )
        self.predicted_way_back_s = self._counter(
            "preemption_predicted_seconds_total",
            "Seconds that were predicted for each way, over the preemptions for which both were known.",
            "way",
        )
        self.late_reloads = self._counter(
            "late_reloads_total",
            "Jobs, here or at peers, that were computed because their reload took longer than that.",
        )
        self.prefetches = self._counter(
            "prefetches_total",
            "Turns of sessions that were announced with next_in_s, by what happened before them: started (a reload), "
            "early (the turn itself), refused (nothing, because the tenant had no budget left).",
            "outcome",
        )
        self.reload_s = self._counter("reload_seconds_total", "Seconds of complete reloads.")
        self.reload_ratio = self._histogram(
            "reload_predicted_over_actual_ratio",
            "Predicted seconds of each complete reload over its actual ones.",
            RATIO_BUCKETS,
        )
        self.predicted_reload_s = self._counter(
            "predicted_reload_seconds_total", "Seconds that were predicted for the complete reloads."
        )


class TransferMetrics(_Family):
    """Metrics of KV transfers on the reader's and the owner's side."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.transfers = self._counter(
            "transfers_total", "Ended KV pulls by transport and outcome.", "transport", "outcome"
        )
        self.bytes = self._counter("transfer_bytes_total", "KV bytes read and validated.", "transport")
        self.duration_s = self._histogram(
            "transfer_seconds",
            "Time from a reader's request to the last validated block, including the prefill.",
            TTFT_BUCKETS_S,
            "transport",
        )
        self.read_s = self._counter(
            "transfer_read_seconds_total",
            "Seconds in which reads were running; transfer_bytes_total divided by it is the speed.",
            "transport",
        )
        self.link_bytes_per_s = self._gauge(
            "link_bytes_per_second", "Measured speed of reads from a peer.", "peer", "transport"
        )
        self.backend_bytes_per_s = self._gauge(
            "link_backend_bytes_per_second",
            "Speed of each transfer backend of a peer when --transfer auto last chose; 0 if it cannot be used.",
            "peer",
            "transfer",
        )
        self.broken_links = self._gauge(
            "broken_links", "Peers whose reads failed and whose link has not passed a probe since, and refused links."
        )
        self.refused_links = self._gauge(
            "refused_links", "Peers that are not read from because their link is slower than --min-link-gbps."
        )
        self.open_leases = self._gauge("open_leases", "Open leases, which pin blocks of this worker for a reader.")
        self.leases_ended = self._counter(
            "leases_ended_total", "Ended leases by outcome: released, abandoned, expired, unclaimed.", "outcome"
        )
        self.validation_failures = self._counter(
            "validation_failures_total",
            "Received KV blocks that failed validation, by the field that did not match.",
            "field",
        )
        for what in ("shape", "epoch", "generation", "hash", "lease"):
            self.validation_failures.labels(what)  # created now, so that the first event is an increase
        self.unexpected_messages = self._counter(
            "unexpected_peer_messages_total", "Late, repeated or unknown messages from readers, by kind.", "kind"
        )
