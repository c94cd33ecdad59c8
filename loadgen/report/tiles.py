"""The tiles of a report page: the main numbers of one run, red where they miss their SLO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from loadgen.report.headline import has_slo
from loadgen.report.scales import format_ms, format_number, format_percent

GOAL = 0.9
"""SLO attainment below this is red; it is the default goal of `loadgen capacity`."""

Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTile:
    """One number with its unit, and a line below it. `color` is bad (red), warn (amber) or empty.

    `is_more_bad` makes only the line below red.
    """

    name: str
    value: str
    unit: str = ""
    more: str = ""
    color: str = ""
    is_more_bad: bool = False


def tiles(run: Run) -> str:
    """Return the tiles of a run as HTML."""
    return f'<div class="tiles">{"".join(map(_html, tiles_of(run)))}</div>'


def tiles_of(run: Run) -> list[ReportTile]:
    """Return the tiles of a run."""
    return [*_outcome(run), *_latencies(run), *_throughput(run), *_prefix_hits(run)]


def _html(tile: ReportTile) -> str:
    unit = f" <small>{escape(tile.unit)}</small>" if tile.unit else ""
    bad = " bad" if tile.is_more_bad else ""
    return (
        f'<div class="tile {tile.color}"><div class="name">{escape(tile.name)}</div>'
        f'<div class="value">{escape(tile.value)}{unit}</div><div class="more{bad}">{escape(tile.more)}</div></div>'
    )


def _outcome(run: Run) -> Iterator[ReportTile]:
    joint, goodput = run["attainment"]["joint"], run["goodput_rps"]
    yield ReportTile(
        name="SLO attainment" if has_slo(run) else "Completed",
        value=format_percent(joint["share"]),
        more=f"{format_percent(joint['low'])} to {format_percent(joint['high'])}",
        color="bad" if (joint["share"] or 0.0) < GOAL else "",
    )
    per_worker = run["goodput_rps_per_worker"]
    yield ReportTile(
        name="Goodput",
        value=format_number(goodput["value"]) if goodput else "–",
        unit="requests/s" if goodput else "",
        more=f"of {format_number(run['offered_rps'])} offered"
        + (f" · {format_number(per_worker)} per worker" if per_worker else ""),
    )


def _latencies(run: Run) -> Iterator[ReportTile]:
    for metric in ("ttft", "tpot"):
        if metric not in run["latency"]:
            continue
        p50, p99 = (run["latency"][metric][key]["value"] for key in ("p50_ms", "p99_ms"))
        number, _, unit = format_ms(p50).partition(" ")
        missed_p50, missed_p99 = (misses_slo(run, metric, q) for q in ("p50", "p99"))
        bounds = sorted({slo[f"{metric}_ms"] for slo in run["slos"].values() if f"{metric}_ms" in slo})
        slo_text = f" · SLO {' and '.join(map(format_ms, bounds))}" if bounds else ""
        yield ReportTile(
            name=f"{metric.upper()} p50",
            value=number,
            unit=unit,
            more=f"p99 {format_ms(p99)}{slo_text}",
            color="bad" if missed_p50 else "",
            is_more_bad=missed_p99,
        )


def misses_slo(run: Run, metric: str, q: str) -> bool:
    """True if this percentile of some class's complete responses is above the class's SLO."""
    for group in run["by_class"]:
        slo = run["slos"].get(group["name"]) or run["slos"].get("default") or {}
        bound, spread = slo.get(f"{metric}_ms"), group[f"{metric}_ms"]
        if bound is not None and spread is not None and spread[q] > bound:
            return True
    return False


def _throughput(run: Run) -> Iterator[ReportTile]:
    if run["throughput"]:
        steady = run["throughput"]["steady"]
        yield ReportTile(
            name="Output",
            value=format_number(steady["output_tokens_per_s"]),
            unit="tokens/s",
            more=f"{format_number(steady['requests_per_s'])} responses/s, steady window",
        )


def _prefix_hits(run: Run) -> Iterator[ReportTile]:
    hits, warm = run["prefix_hits"], run["warm_cache"]
    if hits["achieved"] is None:
        return
    best = max(hits["best"].values(), default=None)
    more = "of prompt tokens" if best is None else f"best possible {format_percent(best)}"
    is_warm = warm["state"] == "warm"
    if is_warm:
        more = f"warm cache; a cold one allows {format_percent(warm['allowed_tokens'] / warm['prompt_tokens'])}"
    yield ReportTile(
        name="Prefix hits", value=format_percent(hits["achieved"]), more=more, color="warn" if is_warm else ""
    )
