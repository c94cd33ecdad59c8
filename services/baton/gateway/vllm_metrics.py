"""Repeats a gateway's metrics under the names of vLLM.

Requests, tokens and latencies are those of this gateway. Running and waiting sequences and the use of the KV
cache are those of the whole cluster, so several gateways report the same values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Code
from baton.core.request import FinishReason
from baton.runtime.observability.metrics import GatewayMetrics
from baton.runtime.observability.vllm_names import KV_USAGE_NAMES, VllmNames

ALIASES: Mapping[str, str] = {
    "vllm:time_to_first_token_seconds": "ttft_s",
    "vllm:time_per_output_token_seconds": "tpot_s",
    "vllm:inter_token_latency_seconds": "tpot_s",
    "vllm:request_time_per_output_token_seconds": "tpot_s",
    "vllm:e2e_request_latency_seconds": "request_s",
    "vllm:request_prompt_tokens": "request_prompt_tokens",
    "vllm:request_generation_tokens": "request_output_tokens",
    "vllm:request_params_max_tokens": "request_max_tokens",
    "vllm:request_max_num_generation_tokens": "longest_sample_tokens",
    "vllm:request_params_n": "request_n",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "output_tokens",
    "vllm:prefix_cache_queries": "prompt_tokens",
    "vllm:prefix_cache_hits": "cached_tokens",
    "vllm:gpu_prefix_cache_queries": "prompt_tokens",
    "vllm:gpu_prefix_cache_hits": "cached_tokens",
}
"""Field of `GatewayMetrics` by vLLM's name, without `_total`. The time between tokens is a request's mean."""
PHASES: Mapping[str, str] = {
    "vllm:request_queue_time_seconds": "queue",
    "vllm:request_prefill_time_seconds": "prefill",
    "vllm:request_decode_time_seconds": "decode",
}
"""Phase of `request_phase_seconds` by vLLM's name."""
FINISH_REASONS: Mapping[str, str] = {
    FinishReason.STOP.value: "stop",
    FinishReason.TOOL_CALLS.value: "stop",
    FinishReason.LENGTH.value: "length",
}
"""vLLM's reason by the reason in answers. For vLLM, a sample with tool calls ends with a stop."""


class VllmMetrics(VllmNames):
    """Collects the metrics of a gateway and its cluster."""

    def __init__(self, model: str, metrics: GatewayMetrics, reports: Callable[[], Sequence[WorkerReport]]) -> None:
        """Create the aliases. `reports` returns the workers' current reports."""
        super().__init__(model)
        self._metrics = metrics
        self._reports = reports

    def collect(self) -> Iterable[Metric]:
        for name, field in ALIASES.items():
            yield self._renamed(name, getattr(self._metrics, field), {})
        for name, phase in PHASES.items():
            yield self._renamed(name, self._metrics.phase_s, {"phase": phase})
        yield from self._gauges()
        yield self._finished()

    def _gauges(self) -> Iterator[Metric]:
        reports = self._reports()
        num_blocks = sum(report.blocks.total for report in reports)
        num_used = num_blocks - sum(report.blocks.free + report.blocks.cached for report in reports)
        running, waiting = sum(r.running_seqs for r in reports), sum(r.waiting_seqs for r in reports)
        yield self._single("vllm:num_requests_running", "Sequences in running batches.", running)
        yield self._single("vllm:num_requests_waiting", "Sequences waiting at workers.", waiting)
        for name in KV_USAGE_NAMES:
            yield self._single(name, "Share of the KV blocks in use, 0 to 1.", num_used / max(1, num_blocks))

    def _finished(self) -> Metric:
        name = "vllm:request_success"
        text = "Ended samples by reason; abort, error: requests that clients cancelled, and that failed with 5xx."
        numbers = dict.fromkeys(("stop", "length", "abort", "error"), 0.0)
        (finished,), (requests,) = self._metrics.finished_samples.collect(), self._metrics.requests.collect()
        for sample in finished.samples:
            if sample.name.endswith("_total"):
                numbers[FINISH_REASONS[sample.labels["reason"]]] += sample.value
        for sample in requests.samples:
            code = sample.labels.get("code", "")
            if sample.name.endswith("_total") and (code == str(Code.CANCELLED.http) or code.startswith("5")):
                numbers["error" if code.startswith("5") else "abort"] += sample.value
        metric = Metric(name, text, "counter")
        for reason, number in numbers.items():
            metric.add_sample(f"{name}_total", self._labels | {"finished_reason": reason}, number)
        return metric
