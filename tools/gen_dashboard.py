"""Generate the Grafana dashboard of the Helm chart from the rows and panels below.

    python tools/gen_dashboard.py            write it
    python tools/gen_dashboard.py --check    exit 1 if the file is stale

All metrics are Baton's own (`services/baton/runtime/observability/metrics.py`). Every query is limited to the
selected namespaces; series without a namespace label always match. Worker metrics get their role from
`baton_worker_info`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "helm/baton/files/dashboards/baton.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
ROLE = "on (namespace, instance) group_left (role) baton_worker_info"
SERVICE = "on (namespace, instance) group_left (service) baton_build_info"
_METRIC = re.compile(r"\b((?:baton|process)_\w+)(\{([^}]*)\})?")


def in_namespace(query: str) -> str:
    """Limit each metric of a query to the selected namespaces."""
    return _METRIC.sub(lambda m: f'{m[1]}{{{m[3] + ", " if m[3] else ""}namespace=~"$namespace"}}', query)


def rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[$__rate_interval]))"


def share(part: str, whole: str, by: str = "") -> str:
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantile(q: float, histogram: str, by: str = "") -> str:
    return f"histogram_quantile({q:g}, {rate(f'{histogram}_bucket', f'{by}, le' if by else 'le')})"


def quantiles(histogram: str, *qs: float, by: str = "") -> dict[str, str]:
    """Return {legend: query} for these quantiles of a histogram."""
    return {f"p{q * 100:g}" + (f" {{{{{by}}}}}" if by else ""): quantile(q, histogram, by) for q in qs}


def by_role(query: str, by: str = "role") -> str:
    """Sum a worker metric by role."""
    return f"sum by ({by}) ({query} * {ROLE})"


ATTAINMENT = share('baton_slo_attainment_total{outcome="met"}', "baton_slo_attainment_total", "term")
ASKED = 'baton_prefix_hit_tokens_total{kind="asked"}'
RATIOS = "baton_predicted_over_actual_ratio_count"
RATIO_TO_80 = 'baton_predicted_over_actual_ratio_bucket{le="0.8"}'
RATIO_TO_125 = 'baton_predicted_over_actual_ratio_bucket{le="1.25"}'
STEPS = by_role("rate(baton_step_seconds_bucket[$__rate_interval])", "role, le")
LAG = f"sum by (service, instance, le) (rate(baton_event_loop_lag_seconds_bucket[$__rate_interval]) * {SERVICE})"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel; `queries` maps legends to PromQL."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    text: str = ""
    stacked: bool = False
    maximum: float | None = None

    def drawn(self, number: int, x: int, y: int) -> dict[str, Any]:
        is_heatmap = self.kind == "heatmap"
        custom: dict[str, Any] = {"fillOpacity": 20 if self.stacked else 5, "showPoints": "never"}
        if self.stacked:
            custom["stacking"] = {"mode": "normal"}
        defaults: dict[str, Any] = {"unit": self.unit, "min": 0, "custom": {} if self.kind != "timeseries" else custom}
        if self.maximum is not None:
            defaults["max"] = self.maximum
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": _OPTIONS[self.kind] | ({"yAxis": {"unit": self.unit}} if is_heatmap else {}),
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": DATASOURCE,
                    "expr": in_namespace(query),
                    "legendFormat": legend,
                    "format": "heatmap" if is_heatmap else "time_series",
                }
                for index, (legend, query) in enumerate(self.queries.items())
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of panels."""

    title: str
    panels: list[Panel] = field(default_factory=list)


def counted(title: str, counter: str, by: str, *, unit: str, text: str = "", width: int = 8) -> Panel:
    """Panel with the stacked rates of a counter by its labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Panel(title=title, queries={legend: rate(counter, by)}, unit=unit, text=text, width=width, stacked=True)


def ratio(
    title: str, queries: dict[str, str], *, text: str = "", kind: str = "timeseries", width: int = 8, height: int = 8
) -> Panel:
    """Panel with ratios from 0 to 1."""
    return Panel(
        title=title, queries=queries, text=text, kind=kind, width=width, height=height, unit="percentunit", maximum=1
    )


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
    "heatmap": {"calculate": False, "color": {"mode": "scheme", "scheme": "Oranges"}, "cellGap": 1},
}

ROWS = [
    Row(
        title="Requests and SLOs",
        panels=[
            Panel(
                title="Requests",
                queries={"": rate("baton_requests_total")},
                unit="reqps",
                kind="stat",
                width=4,
                height=4,
            ),
            ratio(
                "Successful requests",
                {"": share('baton_requests_total{code="200"}', "baton_requests_total")},
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(title="Open requests", queries={"": "sum(baton_open_requests)"}, kind="stat", width=4, height=4),
            ratio(
                "SLO attainment now",
                {"{{term}}": ATTAINMENT},
                text="Share of completed requests with such an SLO that met it.",
                kind="stat",
                width=6,
                height=4,
            ),
            Panel(
                title="Ready workers",
                queries={"{{role}}": 'max by (role) (baton_workers{state="ready"})'},
                kind="stat",
                width=6,
                height=4,
            ),
            counted("Requests by status", "baton_requests_total", "code, reason", unit="reqps"),
            counted(
                "Refused by the scheduler, by reason",
                "baton_rejections_total",
                "reason",
                unit="reqps",
                text="Refused before any prefill.",
            ),
            ratio("SLO attainment", {"{{term}}": ATTAINMENT}),
        ],
    ),
    Row(
        title="Latency of clients",
        panels=[
            Panel(
                title="TTFT",
                queries={"{{le}}": rate("baton_ttft_seconds_bucket", "le")},
                unit="s",
                kind="heatmap",
                width=12,
            ),
            Panel(
                title="TPOT",
                queries={"{{le}}": rate("baton_tpot_seconds_bucket", "le")},
                unit="s",
                kind="heatmap",
                width=12,
            ),
            Panel(title="TTFT", queries=quantiles("baton_ttft_seconds", 0.5, 0.9, 0.99), unit="s"),
            Panel(title="TPOT", queries=quantiles("baton_tpot_seconds", 0.5, 0.9, 0.99), unit="s"),
            Panel(
                title="Mean time per request by phase",
                text="placement: until the scheduler's answer; queue; prefill; kv_exposed: KV transfer after the "
                "prefill; admission: until the first decode step; decode.",
                queries={
                    "{{phase}}": share("baton_request_phase_seconds_sum", "baton_request_phase_seconds_count", "phase")
                },
                unit="s",
                stacked=True,
            ),
            counted("Failed attempts, by reason", "baton_attempts_total", "reason", unit="reqps", width=12),
            Panel(
                title="Pauses of streams that lost a worker, p99",
                queries=quantiles("baton_resume_pause_seconds", 0.99),
                unit="s",
                width=12,
            ),
        ],
    ),
    Row(
        title="Queues",
        panels=[
            Panel(
                title="Queue at the scheduler",
                queries={
                    "requests": "sum(baton_scheduler_queued_requests)",
                    "p99 wait (s)": quantile(0.99, "baton_scheduler_queue_seconds"),
                },
            ),
            Panel(
                title="Queued prompt tokens, by worker (P queue)",
                queries={"{{role}} {{instance}}": f"baton_waiting_prefill_tokens * {ROLE}"},
            ),
            Panel(
                title="Running sequences, by worker (D batch)",
                queries={"{{role}} {{instance}}": f"baton_running_seqs * {ROLE}"},
            ),
            Panel(title="Waiting sequences, by role", queries={"{{role}}": by_role("baton_waiting_seqs")}),
            Panel(
                title="Step duration, p50 and p99 by role",
                queries={f"p{q * 100:g} {{{{role}}}}": f"histogram_quantile({q:g}, {STEPS})" for q in (0.5, 0.99)},
                unit="s",
            ),
            Panel(
                title="Tokens computed, by role",
                queries={"{{role}}": by_role("rate(baton_step_tokens_total[$__rate_interval])")},
            ),
        ],
    ),
    Row(
        title="KV transfers",
        panels=[
            Panel(
                title="KV read, by transport",
                queries={"{{transport}}": rate("baton_transfer_bytes_total", "transport")},
                unit="Bps",
            ),
            Panel(
                title="Read speed, by transport",
                text="Bytes divided by the seconds in which reads were running.",
                queries={
                    "{{transport}}": share(
                        "baton_transfer_bytes_total", "baton_transfer_read_seconds_total", "transport"
                    )
                },
                unit="Bps",
            ),
            counted("Transfers by outcome", "baton_transfers_total", "transport, outcome", unit="ops"),
            Panel(
                title="Measured speed of links",
                queries={"{{instance}} reads {{peer}} ({{transport}})": "baton_link_bytes_per_second"},
                unit="Bps",
            ),
            Panel(
                title="Speed of transfer backends",
                text="When --transfer auto last chose between them. 0: cannot be used.",
                queries={"{{instance}} reads {{peer}} ({{transfer}})": "baton_link_backend_bytes_per_second"},
                unit="Bps",
            ),
            Panel(
                title="Transfer duration, p50 and p99", queries=quantiles("baton_transfer_seconds", 0.5, 0.99), unit="s"
            ),
            Panel(
                title="Leases",
                queries={
                    "open": "sum(baton_open_leases)",
                    "{{outcome}}/s": rate("baton_leases_ended_total", "outcome"),
                },
            ),
            Panel(
                title="Transfer faults (should be 0)",
                queries={
                    "broken links": "sum(baton_broken_links)",
                    "validation failures/s ({{field}})": rate("baton_validation_failures_total", "field"),
                    "unexpected messages/s ({{kind}})": rate("baton_unexpected_peer_messages_total", "kind"),
                },
            ),
        ],
    ),
    Row(
        title="Cache and memory",
        panels=[
            ratio(
                "Prefix cache hit rate (prompt tokens)",
                {
                    "reported": share("baton_cached_tokens_total", "baton_prompt_tokens_total"),
                    "predicted": share('baton_prefix_hit_tokens_total{kind="predicted"}', ASKED),
                    "actual": share('baton_prefix_hit_tokens_total{kind="actual"}', ASKED),
                },
                text="reported: to clients. predicted, actual: by the scheduler and by the workers, of completed "
                "requests.",
            ),
            Panel(
                title="Blocks by tier and state",
                queries={"{{role}} {{tier}} {{state}}": by_role("baton_kv_blocks", "role, tier, state")},
                stacked=True,
            ),
            Panel(
                title="Evictions and preemptions",
                queries={
                    "evicted/s {{role}}": by_role("rate(baton_evictions_total[$__rate_interval])"),
                    "preempted/s {{role}}": by_role("rate(baton_preemptions_total[$__rate_interval])"),
                },
            ),
            Panel(
                title="Blocks held for others",
                queries={"{{role}} {{instance}}": f"baton_kv_blocks_held_for_others * {ROLE}"},
            ),
            Panel(
                title="Prefix index",
                queries={
                    "blocks": "max(baton_prefix_index_blocks)",
                    "workers behind": "max(baton_prefix_index_workers_behind)",
                    "workers with unpublished events": "sum(baton_kv_publisher_behind)",
                    "snapshots after a reset/s": rate("baton_kv_resets_total"),
                },
            ),
            Panel(
                title="Prompt and output tokens",
                queries={"prompt/s": rate("baton_prompt_tokens_total"), "output/s": rate("baton_output_tokens_total")},
            ),
        ],
    ),
    Row(
        title="KV tiers",
        panels=[
            counted(
                "Copies of KV, by tier",
                "baton_tier_bytes_total",
                "tier, direction",
                unit="Bps",
                text="store: from the device to a slower tier. load: back. No series without such a tier.",
            ),
            Panel(
                title="Speed of copies, by tier",
                text="Bytes divided by the seconds in which copies were running.",
                queries={
                    "{{tier}} {{direction}}": share(
                        "baton_tier_bytes_total", "baton_tier_copy_seconds_total", "tier, direction"
                    )
                },
                unit="Bps",
            ),
            Panel(
                title="Reloads",
                text="late: jobs that computed KV because its reload took as long as computing.",
                queries={
                    "{{outcome}}": rate("baton_reloads_total", "outcome"),
                    "late": rate("baton_late_reloads_total"),
                },
                unit="ops",
            ),
            Panel(
                title="Prompt tokens per second, reloaded instead of computed",
                queries={"{{role}}": by_role("rate(baton_reloaded_tokens_total[$__rate_interval])")},
            ),
            Panel(
                title="Predicted / actual reload time",
                text="1 is exact; below 1, reloads were slower than predicted.",
                queries=quantiles("baton_reload_predicted_over_actual_ratio", 0.1, 0.5, 0.9),
            ),
            Panel(
                title="Preemptions, by the predicted faster way back",
                queries={"{{way}}": rate("baton_preemptions_by_way_total", "way")},
                unit="ops",
            ),
            Panel(
                title="Faults of tiers (should be 0)",
                queries={
                    "failed copies/s {{tier}}": rate("baton_tier_failed_copies_total", "tier"),
                    "invalid blocks/s {{tier}}": rate("baton_tier_invalid_blocks_total", "tier"),
                },
                width=12,
            ),
            Panel(
                title="Defects of files of KV since the workers' start",
                text="unfinished, duplicate and foreign_file are normal after a kill, a new release or another model.",
                queries={"{{defect}}": "sum by (defect) (baton_disk_kv_defects_total)"},
                width=12,
            ),
        ],
    ),
    Row(
        title="Predictions and decisions",
        panels=[
            Panel(
                title="Predicted / actual latency, by term",
                text="1 is exact; above 1, requests were faster than predicted.",
                queries=quantiles("baton_predicted_over_actual_ratio", 0.1, 0.5, 0.9, by="term"),
            ),
            ratio(
                "Predictions within -20 % to +25 %",
                {"{{term}}": f"{share(RATIO_TO_125, RATIOS, 'term')} - {share(RATIO_TO_80, RATIOS, 'term')}"},
            ),
            Panel(
                title="Median of predicted / actual, by worker",
                queries={"{{term}} {{worker}}": quantile(0.5, "baton_predicted_over_actual_ratio", "term, worker")},
            ),
            Panel(
                title="Decisions", queries={"{{policy}}": rate("baton_decisions_total", "policy")}, unit="ops", width=12
            ),
            Panel(title="Decision time, p99", queries=quantiles("baton_decision_seconds", 0.99), unit="s", width=12),
        ],
    ),
    Row(
        title="Processes",
        panels=[
            Panel(
                title="Event loop lag, p99",
                queries={"{{service}} {{instance}}": f"histogram_quantile(0.99, {LAG})"},
                unit="s",
            ),
            Panel(
                title="Event loop tasks",
                queries={"{{service}} {{instance}}": f"sum without (function) (baton_event_loop_tasks) * {SERVICE}"},
            ),
            Panel(
                title="Workers by role and state",
                queries={"{{role}} {{state}}": "max by (role, state) (baton_workers)"},
                stacked=True,
            ),
            Panel(
                title="Worker starts in the last hour",
                text="More than one per instance: the worker was restarted.",
                queries={
                    "{{instance}}": "count by (instance) "
                    "(count by (instance, epoch) (last_over_time(baton_worker_info[1h])))",
                },
            ),
            Panel(
                title="Memory",
                queries={"{{service}} {{instance}}": f"process_resident_memory_bytes * {SERVICE}"},
                unit="bytes",
            ),
            Panel(
                title="CPU",
                queries={"{{service}} {{instance}}": f"rate(process_cpu_seconds_total[$__rate_interval]) * {SERVICE}"},
            ),
            Panel(
                title="Redis access of schedulers (1 = degraded)",
                queries={
                    "decision records not written": "max(baton_store_degraded)",
                    "block events not read": "max(baton_kv_events_degraded)",
                },
                maximum=1,
            ),
            counted(
                "Trace spans",
                "baton_trace_spans_total",
                "outcome",
                unit="ops",
                text="failed: the export failed. dropped: the queue was full. No series if tracing is off.",
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    return {
        "uid": "baton",
        "title": "Baton",
        "tags": ["baton", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "namespace",
                    "type": "query",
                    "datasource": DATASOURCE,
                    "query": {"query": "label_values(baton_build_info, namespace)", "refId": "namespace"},
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for row in ROWS:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            "panels": [],
        }
        number, y, x, line_height = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, line_height = 0, y + line_height, 0
            yield panel.drawn(number, x, y)
            number, x, line_height = number + 1, x + panel.width, max(line_height, panel.height)
        y += line_height


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="say whether the file is what this writes, and change nothing"
    )
    if parser.parse_args().check:
        is_fresh = FILE.exists() and FILE.read_text(encoding="utf-8") == text()
        if not is_fresh:
            print(f"{FILE} is stale; run: python tools/gen_dashboard.py", file=sys.stderr)
        return 0 if is_fresh else 1
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
