"""Exports metrics under the names and labels of vLLM, for dashboards and autoscalers that expect them."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

ENGINE = "0"
"""Value of the label `engine`. A Baton process shows one engine."""
KV_USAGE_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""Names of the share of the KV cache in use: vLLM's, and that of its older versions."""


class VllmNames(Collector):
    """Base class of collectors, which make the samples when a metrics page is made."""

    def __init__(self, model: str) -> None:
        """Create the collector. `model` is the name in requests."""
        self._labels = {"model_name": model, "engine": ENGINE}

    def follow(self, registry: CollectorRegistry) -> None:
        """Export the samples with the registry's metrics."""
        registry.register(self)

    def _single(self, name: str, text: str, value: float, kind: str = "gauge", **labels: str) -> Metric:
        """Return a metric with one sample. A counter's name has no `_total`."""
        metric = Metric(name, text, kind)
        metric.add_sample(f"{name}_total" if kind == "counter" else name, self._labels | labels, value)
        return metric

    def _sum(self, name: str, source: MetricWrapperBase) -> Metric:
        """Return the sum of a counter's samples over its labels, under another name without `_total`."""
        (family,) = source.collect()
        total = sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))
        return self._single(name, family.documentation, total, "counter")

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
