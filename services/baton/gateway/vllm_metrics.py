"""Repeats metrics under the names of vLLM, for dashboards and autoscalers that expect them.

Requests, tokens and latencies are those of this gateway. Running and waiting sequences and the use of the KV
cache are those of the whole cluster, so several gateways report the same values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Code
from baton.runtime.observability.metrics import GatewayMetrics

MODEL_NAME = "model_name"
ALIASES: Mapping[str, str] = {
    "vllm:time_to_first_token_seconds": "ttft_s",
    "vllm:time_per_output_token_seconds": "tpot_s",
    "vllm:inter_token_latency_seconds": "tpot_s",
    "vllm:request_time_per_output_token_seconds": "tpot_s",
    "vllm:e2e_request_latency_seconds": "request_s",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "output_tokens",
    "vllm:prefix_cache_queries": "prompt_tokens",
    "vllm:prefix_cache_hits": "cached_tokens",
}
"""Field of `GatewayMetrics` by vLLM's name, without `_total`. The time between tokens is a request's mean."""
PHASES: Mapping[str, str] = {
    "vllm:request_queue_time_seconds": "queue",
    "vllm:request_prefill_time_seconds": "prefill",
    "vllm:request_decode_time_seconds": "decode",
}
"""Phase of `request_phase_seconds` by vLLM's name."""


class VllmMetrics(Collector):
    """Collects the aliases when a metrics page is made."""

    def __init__(self, model: str, metrics: GatewayMetrics, reports: Callable[[], Sequence[WorkerReport]]) -> None:
        """Create the aliases. `reports` returns the workers' current reports."""
        self._labels = {MODEL_NAME: model}
        self._metrics = metrics
        self._reports = reports

    def follow(self, registry: CollectorRegistry) -> None:
        """Export the aliases with the registry's metrics."""
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        for name, field in ALIASES.items():
            yield self._renamed(name, getattr(self._metrics, field), {})
        for name, phase in PHASES.items():
            yield self._renamed(name, self._metrics.phase_s, {"phase": phase})
        yield from self._gauges()
        yield self._finished()

    def _renamed(self, name: str, source: MetricWrapperBase, only: Mapping[str, str]) -> Metric:
        """Return a metric's samples with the labels `only`, under another name."""
        (family,) = source.collect()
        metric = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            is_wanted = all(sample.labels.get(label) == value for label, value in only.items())
            if is_wanted and not sample.name.endswith("_created"):
                labels = {label: value for label, value in sample.labels.items() if label not in only}
                metric.add_sample(name + sample.name.removeprefix(family.name), self._labels | labels, sample.value)
        return metric

    def _gauges(self) -> Iterator[Metric]:
        reports = self._reports()
        num_blocks = sum(report.blocks.total for report in reports)
        num_used = num_blocks - sum(report.blocks.free + report.blocks.cached for report in reports)
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in running batches.", sum(r.running_seqs for r in reports)),
            ("vllm:num_requests_waiting", "Sequences waiting at workers.", sum(r.waiting_seqs for r in reports)),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", num_used / max(1, num_blocks)),
        ):
            metric = Metric(name, text, "gauge")
            metric.add_sample(name, self._labels, value)
            yield metric

    def _finished(self) -> Metric:
        name = "vllm:request_success"
        metric = Metric(name, "Ended samples by reason; abort: requests that their clients cancelled.", "counter")
        (finished,), (requests,) = self._metrics.finished_samples.collect(), self._metrics.requests.collect()
        for sample in finished.samples:
            if not sample.name.endswith("_created"):
                labels = self._labels | {"finished_reason": sample.labels["reason"]}
                metric.add_sample(f"{name}_total", labels, sample.value)
        cancelled = str(Code.CANCELLED.http)
        aborts = sum(
            sample.value
            for sample in requests.samples
            if sample.name.endswith("_total") and sample.labels["code"] == cancelled
        )
        metric.add_sample(f"{name}_total", self._labels | {"finished_reason": "abort"}, aborts)
        return metric
