"""Repeats a worker's metrics under the names of vLLM, for autoscalers and routers that read each worker."""

from collections.abc import Callable, Iterable

from prometheus_client import Gauge
from prometheus_client.core import Metric

from baton.core.kv.kv_events import Tier
from baton.core.kv.kv_layout import KvLayout
from baton.runtime.observability.metrics import EngineMetrics
from baton.runtime.observability.vllm_names import KV_USAGE_NAMES, VllmNames


class WorkerVllmMetrics(VllmNames):
    """Collects the metrics of one worker. They are as old as the last `WorkerMetrics.refresh`."""

    def __init__(self, model: str, metrics: EngineMetrics, layout: Callable[[], KvLayout | None]) -> None:
        """Create the aliases. `layout` returns None until the model is loaded."""
        super().__init__(model)
        self._metrics = metrics
        self._layout = layout

    def collect(self) -> Iterable[Metric]:
        yield self._renamed("vllm:num_requests_running", self._metrics.running_seqs, {})
        yield self._renamed("vllm:num_requests_waiting", self._metrics.waiting_seqs, {})
        yield self._renamed("vllm:num_preemptions", self._metrics.preemptions, {})
        yield self._sum("vllm:spec_decode_num_draft_tokens", self._metrics.draft_tokens)
        yield self._sum("vllm:spec_decode_num_accepted_tokens", self._metrics.accepted_draft_tokens)
        states = ("free", "cached", "used", "receiving", "quarantined")
        blocks = {state: _value(self._metrics.blocks, Tier.DEVICE.value, state) for state in states}
        num_blocks = sum(blocks.values())
        num_used = num_blocks - blocks["free"] - blocks["cached"]
        for name in KV_USAGE_NAMES:
            yield self._single(name, "Share of the KV blocks in use, 0 to 1.", num_used / max(1.0, num_blocks))
        if (layout := self._layout()) is not None:
            sizes = {
                "block_size": str(layout.block_size_tokens),
                "cache_dtype": layout.kv_dtype,
                "num_gpu_blocks": str(round(num_blocks)),
            }
            yield self._single("vllm:cache_config_info", "Always 1; the labels are the sizes.", 1, **sizes)


def _value(gauge: Gauge, *labels: str) -> float:
    (family,) = gauge.labels(*labels).collect()
    return family.samples[0].value
