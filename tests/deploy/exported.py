"""Metrics that the code exports, and the names that queries use."""

from collections.abc import Iterator, Mapping

import promql_parser as ast
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics import MetricWrapperBase

from baton.runtime.observability import metrics
from baton.runtime.observability.metrics import process_registry

FAMILIES = (
    metrics.ProcessMetrics,
    metrics.BudgetMetrics,
    metrics.GatewayMetrics,
    metrics.SchedulerMetrics,
    metrics.FleetMetrics,
    metrics.EngineMetrics,
    metrics.TierMetrics,
    metrics.TransferMetrics,
)
OF_THE_TARGET = frozenset({"job", "instance", "namespace", "pod"})
"""Labels that Prometheus adds to each series."""
OF_KUBERNETES = frozenset({"namespace", "pod"})


def exported() -> dict[str, frozenset[str]]:
    """Return the labels of every series that a service can export, by name, from the metric classes."""
    found: dict[str, frozenset[str]] = {}
    for family in FAMILIES:
        for metric in vars(family(CollectorRegistry())).values():
            if isinstance(metric, MetricWrapperBase):
                found |= _series_of(metric)
    for family in process_registry("x").collect():
        for sample in family.samples:
            found[sample.name] = frozenset(sample.labels)
    return found


def _series_of(metric: MetricWrapperBase) -> dict[str, frozenset[str]]:
    labels = frozenset(metric._labelnames)
    name = metric._name
    if isinstance(metric, Histogram):
        return {f"{name}_bucket": labels | {"le"}, f"{name}_count": labels, f"{name}_sum": labels}
    return {f"{name}_total" if metric._type == "counter" else name: labels}


def selectors(query: str) -> Iterator[ast.VectorSelector]:
    """Yield the selectors of a query. Raises ValueError for an invalid query."""
    found: list[ast.VectorSelector] = []

    def visit(node: ast.Expr) -> None:
        if isinstance(node, ast.VectorSelector):
            found.append(node)

    ast.walk(ast.parse(query), visit)
    yield from found


def grouping_labels(query: str) -> set[str]:
    """Return the labels that a query groups by, matches on or copies."""
    found: set[str] = set()

    def visit(node: ast.Expr) -> None:
        if isinstance(node, ast.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)
        elif isinstance(node, ast.BinaryExpr) and node.modifier is not None:
            if node.modifier.matching is not None:
                found.update(node.modifier.matching.labels)
            found.update(node.modifier.group_labels or [])

    ast.walk(ast.parse(query), visit)
    return found


def problems(query: str, known: Mapping[str, frozenset[str]]) -> list[str]:
    """Return the names in a query that no service exports."""
    found, there = [], set(OF_THE_TARGET)
    for selector in selectors(query):
        if selector.name is None or selector.name not in known:
            found.append(f"no metric {selector.name}")
            continue
        labels = known[selector.name] | OF_THE_TARGET
        there |= labels
        found += [f"{selector.name} has no label {m.name}" for m in selector.matchers.matchers if m.name not in labels]
    return found + [f"nothing has a label {label}" for label in sorted(grouping_labels(query) - there)]
