"""Builds `report.json`: every number of a report and the data of every figure. Its form is in `schema.json`.

Values are in milliseconds, shares from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from loadgen.measure import request_metrics
from loadgen.measure.remedies import remedies
from loadgen.report import groups
from loadgen.report.critical_path import mean_path
from loadgen.report.drawing import figures, run_figures
from loadgen.report.headline import headline
from loadgen.report.misses import misses
from loadgen.report.run_view import RunView
from loadgen.slo_target import SloTarget

FORMAT = 1
"""Version in `loadgen_report`. Raised when a field is removed or changes its meaning."""

DEFINITIONS = {
    "ttft": "first token − intended send",
    "ttft_sent": "first token − actual send",
    "tpot": "(last token − first token) / (output tokens − 1); one-token responses have none and meet any TPOT SLO",
    "itl": "gaps between successive tokens; 0 between tokens of one message",
    "tbt": "mean of the longest 10 % of a request's gaps",
    "e2e": "last token − intended send",
    "e2e_sent": "last token − actual send",
    "normalised": "e2e / output tokens",
    "queue": "wait for the prefill worker, at the scheduler and at the worker, from the server's timeline",
    "predicted to actual": "predicted / measured by the server, from the placement on; requests with a single attempt",
    "attainment": "good / offered; for one SLO bound: complete responses that met it / offered requests with that "
    "bound",
    "goodput": "attainment × offered rate",
    "percentile": "linear interpolation between ranks, rank = q (n − 1)",
    "interval": "95 %; block bootstrap over requests in order of intended time; shares: Wilson on the effective "
    "number of requests",
    "of_offered": "percentile over all offered requests; one without a complete response counts as infinitely slow",
}


def report_of(runs: Sequence[RunView], version: str = "") -> dict[str, Any]:
    """Return the report of the runs. It is valid by `schema()` and contains no NaN or infinity."""
    entries = [run_of(run) for run in runs]
    found = {
        "loadgen_report": FORMAT,
        "version": version,
        "headline": headline(entries),
        "definitions": DEFINITIONS,
        "runs": entries,
        "figures": [*figures.across_runs(runs), *(figure for run in runs for figure in run_figures.of_run(run))],
    }
    cleaned: dict[str, Any] = _clean(found)
    return cleaned


def schema() -> str:
    """Return the JSON Schema of `report.json` as text."""
    return resources.files("loadgen.report").joinpath("schema.json").read_text(encoding="utf-8")


def run_of(view: RunView) -> dict[str, Any]:
    """Return the report's entry for one run."""
    run, summary = view.result.run, view.summary
    goodput = summary.goodput_rps
    complete = [int(row) for row in np.flatnonzero(view.measures.complete)]
    return {
        "name": view.name,
        "label": view.label,
        "plan_hash": run.plan_hash,
        "plan_name": run.plan_name,
        "url": run.url,
        "protocol": run.protocol,
        "model": run.model,
        "started_at": run.started_at,
        "duration_s": run.duration_s,
        "loadgen_version": run.version,
        **_validity(view),
        "offered_text": view.offered_text,
        "interrupted": run.interrupted,
        "notes": list(view.notes),
        "slos": {name: _slo(slo) for name, slo in view.rules.slos.items()},
        "ignore_eos": run.ignore_eos,
        "check": dict(run.check),
        "processes": run.processes,
        "warmup_requests": run.warmup_requests,
        "flags": dict(run.flags),
        "machine": dict(run.machine),
        "server": dict(run.server),
        "offered": summary.offered,
        "outcomes": {str(outcome): count for outcome, count in summary.outcomes.items()},
        "misses": misses(view),
        "attainment": {name: share.to_json() for name, share in summary.attainment.items()},
        "offered_rps": summary.offered_rps,
        "goodput_rps": goodput.to_json() if goodput else None,
        "workers": view.workers,
        "goodput_rps_per_worker": goodput.value / view.workers if goodput and view.workers else None,
        "sending": _sending(view),
        "latency": {name: distribution.to_json() for name, distribution in summary.latency.items()},
        "throughput": summary.throughput.to_json() if summary.throughput else None,
        "tokens_per_message": summary.tokens_per_message,
        "prefix_hits": _prefix_hits(view),
        "prompts": {
            "planned_tokens": summary.prompts.planned_tokens,
            "counted_tokens": summary.prompts.counted_tokens,
            "requests": summary.prompts.requests,
            "deviation": summary.prompts.deviation,
        },
        "critical_path_ms": {stage: seconds * 1e3 for stage, seconds in mean_path(view.measures, complete).items()}
        if complete
        else {},
        "handoff": groups.handoffs(view.measures),
        "predicted_to_actual_ttft": groups.predictions(view.measures, "ttft"),
        "predicted_to_actual_tpot": groups.predictions(view.measures, "tpot"),
        "by_class": groups.by(view, lambda record: record.slo_class),
        "by_tenant": groups.by(view, lambda record: record.tenant or "(none)"),
        "by_endpoint": groups.by(view, lambda record: record.endpoint or "(none)"),
        "by_worker": groups.workers(view),
        "errors": groups.errors(view.measures),
    }


def _validity(view: RunView) -> dict[str, Any]:
    advice = remedies(view.result.run, view.result.records, view.rules) if view.invalid else ()
    return {
        "valid": not view.invalid,
        "invalid": list(view.invalid),
        "remedies": list(advice),
        "warm_cache": view.cache.to_json(),
        "verdict": view.verdict,
    }


def _prefix_hits(view: RunView) -> dict[str, Any]:
    prefix = view.summary.prefix
    return {
        "achieved": prefix.ratio if prefix.requests else None,
        "cached_tokens": prefix.cached_tokens,
        "prompt_tokens": prefix.prompt_tokens,
        "requests": prefix.requests,
        "by_tier": dict(prefix.by_tier),
        "best": dict(view.best_hits),
    }


def _sending(view: RunView) -> dict[str, Any]:
    sent = view.summary.sending
    lags = {"p50": sent.lag_p50_s, "p99": sent.lag_p99_s, "max": sent.lag_max_s}
    return {
        "due": sent.num_due,
        "sent": sent.num_sent,
        "due_rps": sent.due_rps,
        "achieved_rps": sent.achieved_rps,
        **{f"lag_{name}_ms": None if lag is None else lag * 1e3 for name, lag in lags.items()},
        "lag_limit_ms": request_metrics.lag_limit_s(view.rules) * 1e3,
    }


def _slo(slo: SloTarget) -> dict[str, float]:
    return {key.replace("_s", "_ms"): seconds * 1e3 for key, seconds in slo.to_json().items()}


def _clean(value: Any) -> Any:
    """Convert a value to JSON: no NaN or infinity, numbers with nine digits, other types as text."""
    if isinstance(value, Mapping):
        return {str(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return str(value)
