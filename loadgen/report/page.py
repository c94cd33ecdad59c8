"""Writes `report.html`: one self-contained file with the figures, the tables and the JSON report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from loadgen.report import tables
from loadgen.report.drawing.svg import draw, legend
from loadgen.report.scales import format_ms, format_percent
from loadgen.report.tiles import tiles

MOST_PLANS = 4
"""Most plans named at the top."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content security policy: the browser loads nothing from outside of the file."""


def page(report: Mapping[str, Any]) -> str:
    """Return the complete HTML document."""
    runs: list[Mapping[str, Any]] = report["runs"]
    figures = {figure["id"]: figure for figure in report["figures"]}
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    body = [
        _head(runs, title),
        f'<p class="headline">{escape(report["headline"])}</p>',
        *(_verdict(run, len(runs) > 1) for run in runs),
        tiles(runs[0]) if len(runs) == 1 else tables.runs(runs),
        _section("Outcome", _figures(figures, ["outcomes", "attainment-scale", "attainment-rate", "goodput-rate"])),
        _section(
            "Latency",
            _figures(figures, ["attainment-ttft", "attainment-tpot", "cdf-itl", "attainment-e2e"]) + _latencies(runs),
        ),
        _section(
            "Inside the server",
            _figures(
                figures, ["path-runs", *(["path-0", "head-0"] if len(runs) == 1 else []), "handoff", "prefix-hits"]
            ),
        ),
        *(_run(number, run, figures, is_only=len(runs) == 1) for number, run in enumerate(runs)),
        _section("Definitions", tables.definitions(report["definitions"])),
        f"<footer>loadgen {escape(str(report['version']))}. This page contains all its numbers as JSON, the same "
        "as report.json.</footer>",
    ]
    data = json.dumps(report, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        "<title>loadgen: "
        f"{escape(title)}</title>\n<style>\n{_resource('report.css')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f'\n</main>\n<script type="application/json" id="report">{data}</script>\n'
        f"<script>\n{_resource('report.js')}</script>\n</body>\n</html>\n"
    )


def _head(runs: Sequence[Mapping[str, Any]], title: str) -> str:
    hashes = list(dict.fromkeys(run["plan_hash"] for run in runs))
    where = ", ".join(dict.fromkeys(f"{run['model']} at {run['url']} over {run['protocol']}" for run in runs))
    plans = ", ".join(f"<code>{escape(plan_hash[:16])}</code>" for plan_hash in hashes[:MOST_PLANS]) + (
        " …" if len(hashes) > MOST_PLANS else ""
    )
    started = runs[0]["started_at"] if len(runs) == 1 else f"{min(run['started_at'] for run in runs)} and later"
    names = list(dict.fromkeys(str(run["plan_name"]) for run in runs if run["plan_name"]))
    name = " · ".join(names[:MOST_PLANS]) + (f" and {len(names) - MOST_PLANS} more" if len(names) > MOST_PLANS else "")
    offered = f" · {runs[0]['offered_text']}" if len(runs) == 1 and runs[0]["offered_text"] else ""
    return (
        f'<header><div class="eyebrow">loadgen report</div><h1>{escape(title)}</h1><p class="lead">{escape(where)}</p>'
        f'<p class="small">started {escape(started)} · plan{"s" if len(hashes) > 1 else ""} {escape(name)} '
        f"{plans}{escape(offered)}</p></header>"
    )


def _verdict(run: Mapping[str, Any], is_named: bool) -> str:
    """Return the box that says whether the numbers can be used, and the box with notes.

    There is one box for validity and cache, so that the two cannot contradict each other.
    """
    name = f"{escape(run['name'])}: " if is_named else ""
    warm = run["warm_cache"]
    sentence = f"{escape(warm['text'][:1].upper() + warm['text'][1:])}." if warm["text"] else ""
    parts = []
    if run["verdict"] == "invalid":
        reasons = [*run["invalid"], *([warm["text"]] if warm["state"] == "warm" else [])]
        changes = "".join(f"<li>{escape(remedy)}</li>" for remedy in run["remedies"])
        parts.append(
            f'<div class="verdict invalid" role="alert"><b>{name}INVALID RUN</b> Do not quote these '
            f"numbers.<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ul>"
            + (f"What to change:<ul>{changes}</ul>" if changes else "")
            + "</div>"
        )
    elif run["verdict"] == "warm":
        fact = warm["text"].removeprefix("warm cache: ")
        parts.append(
            f'<div class="verdict warm" role="alert"><b>{name}WARM CACHE</b> These numbers are better than those of an '
            f"empty cache: {escape(fact)}. Sending was in time: {_sending(run)}.</div>"
        )
    elif not is_named:
        parts.append(f'<div class="verdict valid"><b>Valid run.</b> {_sending(run)}.</div>')
    notes = [
        *([sentence] if warm["state"] == "unknown" and sentence else []),
        *(escape(note) for note in run["notes"]),
        *(["The run ended early; results up to then are kept."] if run["interrupted"] else []),
    ]
    if notes:
        parts.append(f'<div class="verdict note"><b>{name}Note.</b> {" ".join(notes)}</div>')
    return "".join(parts)


def _sending(run: Mapping[str, Any]) -> str:
    sent = run["sending"]
    rate = ""
    if sent["achieved_rps"] and sent["due_rps"]:
        deviation = abs(sent["achieved_rps"] / sent["due_rps"] - 1)
        rate = f"; offered rate met to within {format_percent(deviation, 2)} (limit 1 %)"
    return f"p99 send lag {format_ms(sent['lag_p99_ms'])} (limit {format_ms(sent['lag_limit_ms'])}){rate}"


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def _figures(figures: Mapping[str, Mapping[str, Any]], ids: Sequence[str]) -> str:
    drawn = [_figure(figures[figure_id]) for figure_id in ids if figure_id in figures]
    return f'<div class="figures">{"".join(drawn)}</div>' if drawn else ""


def _figure(figure: Mapping[str, Any]) -> str:
    width = " class=wide" if figure["is_wide"] else ""
    return (
        "<figure "
        f'data-figure="{escape(figure["id"])}"{width}><h3>{escape(figure["title"])}</h3>'
        f'<p class="caption">{escape(figure["caption"])}</p>{legend(figure)}{draw(figure)}</figure>'
    )


def _latencies(runs: Sequence[Mapping[str, Any]]) -> str:
    if len(runs) == 1:
        return tables.latency(runs[0])
    return "".join(f"<details><summary>{escape(run['name'])}</summary>{tables.latency(run)}</details>" for run in runs)


def _run(number: int, run: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]], *, is_only: bool) -> str:
    """Return the sections of one run. With several runs, each can be collapsed."""
    over_time = _figures(figures, [f"{name}-{number}" for name in ("rates", "in-flight", "ttft-time")])
    single = _figures(figures, [f"waterfall-{number}", *([] if is_only else [f"path-{number}", f"head-{number}"])])
    parts = [
        ("Over time", over_time),
        ("Single requests", single),
        ("By class, tenant and endpoint", tables.groups(run)),
        ("Workers", tables.workers(run)),
    ]
    parts += [
        ("Errors", tables.errors(run)),
        ("Sending and throughput", tables.rates(run)),
        ("Configuration", tables.configuration(run)),
    ]
    if is_only:
        return "".join(_section(title, inside) for title, inside in parts)
    inside = "".join(_section(title, part) for title, part in parts)
    is_open = " open" if number == 0 else ""
    return f'<details class="run"{is_open}><summary>{escape(run["name"])}</summary>{inside}</details>'


def _resource(name: str) -> str:
    return resources.files("loadgen.report").joinpath(name).read_text(encoding="utf-8")
