"""Figures that show all runs of a report together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.measure.measures import SLOS
from loadgen.measure.request_metrics import RequestOutcome
from loadgen.measure.stats import Floats
from loadgen.report.critical_path import STAGES, mean_path
from loadgen.report.drawing.figure import Figure, axis, cdf, lines, series_of, spans, used
from loadgen.report.run_view import SERIES_COLORS, RunView

_KINDS = (
    "Rings: invalid runs. Pale: ended early; requests in flight at the end count as not good, "
    "so the true value may be higher."
)
BEST = "plan's best, "
"""Beginning of the names of ideal caches, which the legend says already."""
FEW_RUNS = 3
"""Up to this many runs, a bar for each needs half of the page's width."""
RATE_SPREAD = 0.1
"""Rates that differ by less than this share are the same rate, drawn twice."""
VISIBLE_LAG = 0.02
"""A curve from the actual send is drawn only if it differs by more than this share."""
TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Gap between tokens",
    "e2e": "End-to-end latency",
}


def across_runs(runs: Sequence[RunView]) -> list[Figure]:
    """Return the figures that compare all runs."""
    figures = [outcomes(runs)]
    if _rates_differ(runs):
        figures += [goodput_by_rate(runs), attainment_by_rate(runs)]
    figures.append(attainment_by_scale(runs))
    figures += [attainment(runs, metric) for metric in ("ttft", "tpot", "e2e")]
    figures.append(gaps(runs))
    figures += [path_by_run(runs)] if len(runs) > 1 else []
    figures.append(handoff(runs))
    figures.append(prefix_hits(runs))
    return [figure for figure in figures if figure.get("series") or figure.get("rows")]


def outcomes(runs: Sequence[RunView]) -> Figure:
    """Return the outcomes of each run as stacked bars."""
    rows = []
    for run in runs:
        parts, at = list[dict[str, Any]](), 0.0
        for outcome, count in run.summary.outcomes.items():
            share = count / max(run.summary.offered, 1)
            if count:
                tip = f"{run.name} · {outcome_label(outcome)}: {count} of {run.summary.offered} ({100 * share:.1f} %)"
                parts.append(
                    {
                        "name": outcome_label(outcome),
                        "color": f"o-{outcome}",
                        "from": at,
                        "to": at + share,
                        "value": share,
                        "tip": tip,
                    }
                )
                at += share
        rows.append({"name": run.name, "spans": parts})
    return spans(
        "outcomes",
        "Outcomes of all offered requests",
        "Each request has exactly one outcome; the outcomes sum to the offered requests.",
        axis("share of offered requests", "share", (), min=0.0, max=1.0),
        rows,
        [outcome_label(outcome) for outcome in RequestOutcome],
        row_height=34 if len(rows) < 4 else 24,
        is_wide=len(rows) > FEW_RUNS,
    )


def _rates_differ(runs: Sequence[RunView]) -> bool:
    """True if a figure by rate has more to show than points above each other."""
    rates = [run.summary.offered_rps for run in runs if run.summary.offered_rps is not None]
    return len(rates) > 1 and max(rates) > min(rates) * (1 + RATE_SPREAD)


def goodput_by_rate(runs: Sequence[RunView]) -> Figure:
    """Return goodput against offered rate, one line for each label."""
    series = [
        _by_rate(number, label, members, is_share=False)
        for number, (label, members) in enumerate(_by_label(runs).items())
    ]
    top = max((point[0] for one in series for point in one["points"]), default=1.0) * 1.05
    series.append(series_of("all offered requests good", "ideal", "dashed", [[0.0, 0.0], [top, top]]))
    return lines(
        "goodput-rate",
        "Goodput by offered rate",
        f"Requests per second that completed within their SLO, by offered rate. Bars: 95 % intervals. {_KINDS}",
        axis("offered rate, requests/s", "", (), min=0.0, max=top),
        axis("goodput, requests/s", "", (), min=0.0, max=top),
        series,
    )


def attainment_by_rate(runs: Sequence[RunView]) -> Figure:
    """Return SLO attainment against offered rate, one line for each label."""
    series = [
        _by_rate(number, label, members, is_share=True)
        for number, (label, members) in enumerate(_by_label(runs).items())
    ]
    top = max((point[0] for one in series for point in one["points"]), default=1.0) * 1.05
    return lines(
        "attainment-rate",
        "SLO attainment by offered rate",
        "Share of offered requests that met their SLO. The rate at which a line crosses 90 % is a common measure "
        "of capacity. Bars: 95 % intervals. "
        f"{_KINDS}",
        axis("offered rate, requests/s", "", (), min=0.0, max=top),
        axis("offered requests", "share", (), min=0.0, max=1.0),
        series,
        marks=[{"axis": "y", "at": 0.9, "name": "90 %"}],
    )


def _by_label(runs: Sequence[RunView]) -> dict[str, list[RunView]]:
    found: dict[str, list[RunView]] = {}
    for run in runs:
        if run.summary.offered_rps is not None:
            found.setdefault(run.label, []).append(run)
    return found


def _by_rate(number: int, label: str, runs: list[RunView], *, is_share: bool) -> dict[str, Any]:
    runs = sorted(runs, key=lambda run: run.summary.offered_rps or 0.0)
    rates = [run.summary.offered_rps or 0.0 for run in runs]
    scales = [1.0 if is_share else rate for rate in rates]
    shares = [run.summary.joint for run in runs]
    return series_of(
        label,
        f"c{number % SERIES_COLORS}",
        "marked",
        [[rate, share.value * scale] for rate, share, scale in zip(rates, shares, scales, strict=True)],
        bars=[
            [share.interval.low * scale, (share.interval.high or 0.0) * scale]
            for share, scale in zip(shares, scales, strict=True)
        ],
        classes=["invalid" if run.invalid else "early" if run.result.run.interrupted else "" for run in runs],
        names=[
            f"{run.name}: {share.kept} of {share.of} good at {rate:.3g} requests/s{_doubts(run)}"
            for run, share, rate in zip(runs, shares, rates, strict=True)
        ],
    )


def _doubts(run: RunView) -> str:
    is_early = run.result.run.interrupted
    return (" · INVALID" if run.invalid else "") + (
        " · ended early: requests in flight count as not good" if is_early else ""
    )


def attainment_by_scale(runs: Sequence[RunView]) -> Figure:
    """Return SLO attainment against a factor on all SLO bounds."""
    found = []
    for run in runs:
        needed = needed_scale(run)
        if needed is not None:
            found.append((run, needed))
    finite = np.concatenate([np.zeros(0), *(needed[np.isfinite(needed)] for _, needed in found)])
    low, high = np.percentile(finite, (1, 99)) if finite.size else (0.5, 2.0)
    low, high = float(np.clip(low, 0.01, 0.5)), float(np.clip(high * 1.2, 2.0, 50.0))
    series = [
        series_of(run.name, run.color, "line", cdf(needed[np.isfinite(needed)], needed.size, low=low, high=high))
        for run, needed in found
    ]
    _level(series, high)
    return lines(
        "attainment-scale",
        "SLO attainment by SLO scale",
        "Share of offered requests that would meet their SLO if all its bounds were multiplied by x. 1 is the SLO "
        "itself.",
        axis("SLO scale", "×", (), is_log=True, min=low, max=high),
        axis("offered requests", "share", (), min=0.0, max=1.0),
        series,
        marks=[{"axis": "x", "at": 1.0, "name": "the SLO"}],
    )


def needed_scale(run: RunView) -> Floats | None:
    """Return the factor on its SLO at which each request would be good, or None if no request has an SLO.

    It is infinite without a complete response.
    """
    measures = run.measures
    if not any(measures.has_slo[slo].any() for slo in SLOS):
        return None
    needed = np.zeros(len(measures))
    for row, record in enumerate(measures.records):
        slo = run.rules.slo_of(record)
        for metric, bound in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e", slo.e2e_s)):
            value = measures.columns[metric][row]
            if bound is not None and not math.isnan(value):
                needed[row] = max(needed[row], value / bound)
    needed[~measures.complete] = math.inf
    return np.maximum(needed, 1e-6)


def attainment(runs: Sequence[RunView], metric: str) -> Figure:
    """Return the share of offered requests with a complete response within x, for one metric."""
    series: list[dict[str, Any]] = []
    has_sent = False
    for run in runs:
        offered, is_only = len(run.measures), len(runs) == 1
        values = run.measures.of_complete(metric) * 1e3
        if not values.size:
            continue
        name = "from intended send" if is_only and metric != "tpot" else run.name
        series.append(series_of(name, run.color, "line", cdf(values, offered)))
        sent = values if metric == "tpot" else run.measures.of_complete(f"{metric}_sent") * 1e3
        if np.percentile(values, 99) > np.percentile(sent, 99) * (1 + VISIBLE_LAG):
            has_sent = True
            more = {} if is_only else {"key": len(series) - 1}
            name = "from actual send" if is_only else f"{run.name}, from actual send"
            series.append(series_of(name, run.color, "dashed", cdf(sent, offered), **more))
    marks, series = slo_marks(runs, metric), used(series)
    x = _latency_axis(f"{metric}, at most", series, marks)
    _level(series, x["max"])
    return lines(
        f"attainment-{metric}",
        f"{TITLES[metric]} ({metric})",
        "Share of offered requests with a complete response within x. A curve that ends below 100 % shows "
        "requests without one."
        + (" One-token responses have no TPOT and are not included." if metric == "tpot" else "")
        + (" Dotted: from the actual send." if has_sent else ""),
        x,
        axis("offered requests", "share", (), min=0.0, max=1.0),
        series,
        marks=marks,
    )


def gaps(runs: Sequence[RunView]) -> Figure:
    """Return the distribution of the gaps between tokens of complete responses."""
    series = used(
        [series_of(run.name, run.color, "line", cdf(run.measures.gaps * 1e3, run.measures.gaps.size)) for run in runs]
    )
    return lines(
        "cdf-itl",
        f"{TITLES['itl']} (itl)",
        "Share of gaps of complete responses within x. Tokens of one message have a gap of 0, left of the axis.",
        _latency_axis("itl", series),
        axis("gaps of complete responses", "share", (), min=0.0, max=1.0),
        series,
    )


def path_by_run(runs: Sequence[RunView]) -> Figure:
    """Return the mean critical path of each run."""
    rows = []
    for run in sorted(runs, key=lambda run: run.summary.offered_rps or 0.0):
        chosen = [int(row) for row in np.flatnonzero(run.measures.complete)]
        if chosen:
            rows.append(stacked(f"{run.name} · {run.summary.offered_rps or 0:.3g}/s", mean_path(run.measures, chosen)))
    return spans(
        "path-runs",
        "Critical path by run",
        "Mean time of complete responses in each stage, from the intended send to the last token.",
        axis("mean milliseconds", "ms", [row["spans"][-1]["to"] for row in rows if row["spans"]], min=0.0),
        rows,
        list(STAGES),
        is_wide=True,
    )


def handoff(runs: Sequence[RunView]) -> Figure:
    """Return the distribution of handoff costs."""
    series = []
    for run in runs:
        stages = [one for one in run.measures.stages if one.is_handed_off and one.handoff_s is not None]
        parts = [("cost: exposed + admission", [one.handoff_s for one in stages], "line")]
        if len(runs) == 1:
            parts += [
                ("exposed transfer", [one.exposed_s for one in stages], "dashed"),
                ("total transfer", [one.transfer_s for one in stages], "line"),
            ]
        for number, (name, seconds, style) in enumerate(parts):
            known = np.array([value for value in seconds if value is not None]) * 1e3
            color = run.color if len(runs) > 1 else f"c{number}"
            series.append(series_of(run.name if len(runs) > 1 else name, color, style, cdf(known, known.size)))
    series = used(series)
    return lines(
        "handoff",
        "Cost of the handoff",
        "Requests handed off from a prefill to a decode worker: time from the end of prefill to the first decode "
        "step. For a single "
        "run also the total read time; the part that is not exposed overlapped with computation.",
        _latency_axis("handoff", series),
        axis("requests handed off", "share", (), min=0.0, max=1.0),
        series,
    )


def prefix_hits(runs: Sequence[RunView]) -> Figure:
    """Return achieved and best possible prefix hit ratios; empty if nothing was shared or hit.

    A single run has one bar for each value. With several, each run has a bar with marks at its plan's best.
    """
    reporting = [
        run
        for run in runs
        if run.summary.prefix.requests and (run.summary.prefix.cached_tokens or any(run.best_hits.values()))
    ]
    rows = []
    for run in reporting:
        ratio = run.summary.prefix.ratio
        if len(reporting) == 1:
            rows += [_hits("achieved", ratio, run.color, "achieved")]
            rows += [
                _hits(name.removeprefix(BEST), best, "ideal", "the plan's best") for name, best in run.best_hits.items()
            ]
        else:
            marks = [
                {"at": best, "name": f"{name}: {100 * best:.1f} %", "color": "best"}
                for name, best in run.best_hits.items()
            ]
            rows.append(_hits(run.name, ratio, run.color, "achieved") | {"marks": marks})
    return spans(
        "prefix-hits",
        "Prefix hits: achieved and best possible",
        "Cached share of all prompt tokens, as reported by the server, compared with ideal caches that get the "
        "same requests in order" + (" (marks)." if len(reporting) > 1 else "."),
        axis("share of prompt tokens", "share", (), min=0.0, max=1.0),
        rows,
        ["achieved", "the plan's best"],
        row_height=30,
    )


def _hits(name: str, ratio: float, color: str, kind: str) -> dict[str, Any]:
    return {
        "name": name,
        "spans": [{"name": kind, "color": color, "from": 0.0, "to": ratio}],
        "note": f"{100 * ratio:.1f} %",
    }


def outcome_label(outcome: RequestOutcome) -> str:
    """Return an outcome's name with spaces."""
    return outcome.replace("_", " ")


def stacked(name: str, stages: dict[str, float]) -> dict[str, Any]:
    """Return a row of stacked stages in milliseconds."""
    parts, at = list[dict[str, Any]](), 0.0
    for stage, seconds in stages.items():
        parts.append({"name": stage, "color": STAGES[stage], "from": at, "to": at + seconds * 1e3})
        at += seconds * 1e3
    return {"name": name, "spans": parts}


def slo_marks(runs: Sequence[RunView], metric: str, on: str = "x") -> list[dict[str, Any]]:
    """Return a mark on an axis for each SLO bound of the metric, with its classes if there are several."""
    bounds: dict[float, set[str]] = {}
    for run in runs:
        for name, slo in run.rules.slos.items():
            bound = slo.to_json().get(f"{metric}_s")
            if bound is not None:
                bounds.setdefault(bound * 1e3, set()).add(name)
    return [
        {"axis": on, "at": at, "name": "SLO" if len(bounds) == 1 else f"SLO {', '.join(sorted(names))}"}
        for at, names in sorted(bounds.items())
    ]


def _level(series: Sequence[dict[str, Any]], end: float) -> None:
    """Extend curves over all offered requests to the right edge of the figure."""
    for one in series:
        if one["points"] and one["points"][-1][0] < end:
            one["points"].append([end, one["points"][-1][1]])


def _latency_axis(label: str, series: Sequence[dict[str, Any]], marks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return axis(
        label,
        "ms",
        [point[0] for one in series for point in one["points"]] + [mark["at"] for mark in marks],
        is_log=True,
    )
