"""The metrics page: every Prometheus metric with its type, labels and meaning."""

import inspect

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from baton.gateway.live.metrics_page import UP, UP_LABELS, UP_MEANING
from baton.runtime.observability import metrics
from tools.reference.markdown import code, page, paragraph, table

INTRODUCTION = """
Every service serves these at `/metrics` of its admin port, in Prometheus's text format; a gateway also at `/metrics`
of its HTTP port. The names are stable within a release; renamed ones are listed in the changelog. Processes also
export the `process_*` metrics of the Prometheus client and `baton_build_info`.
"""
COLUMNS = ("metric", "type", "labels", "meaning")


def metrics_page() -> str:
    """One section per class of metrics, in the order of the module."""
    parts = [paragraph(INTRODUCTION)]
    for name, kind in inspect.getmembers(metrics, inspect.isclass):
        if not name.endswith("Metrics"):
            continue
        registry = CollectorRegistry()
        rows = [
            (
                code(_exported(metric)),
                metric._type,
                ", ".join(code(label) for label in metric._labelnames),
                metric._documentation,
            )
            for metric in vars(kind(registry)).values()
            if isinstance(metric, MetricWrapperBase)
        ]
        title = f"{name.removesuffix('Metrics')} metrics"
        parts += [f"## {title}", table(COLUMNS, rows)]
    of_page = (code(UP), "gauge", ", ".join(code(label) for label in UP_LABELS), UP_MEANING)
    parts += ["## Metrics of `/metrics/cluster` alone", table(COLUMNS, [of_page])]
    return page("Metrics", *parts)


def _exported(metric: MetricWrapperBase) -> str:
    """The name as Prometheus shows it: counters end with `_total`."""
    return f"{metric._name}_total" if metric._type == "counter" else metric._name
