"""HTML tables of the report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from loadgen.report.configuration import format_bytes, pairs
from loadgen.report.scales import format_ms, format_number, format_percent

Run = Mapping[str, Any]
VERDICTS = {
    "valid": "yes",
    "warm": '<span class="warm-text">WARM CACHE</span>',
    "invalid": '<span class="invalid-text">INVALID</span>',
}
IN_RUN = ("model", "protocol", "urls", "warmup", "processes", "slo")
"""Options whose effective values are among the facts about the run."""
LATENCY_ROWS = ("ttft", "ttft_sent", "tpot", "itl", "tbt", "e2e", "e2e_sent", "normalised", "queue")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int] = (0,)) -> str:
    """Return an HTML table. Cells must already be HTML."""
    if not rows:
        return ""

    def kind(column: int) -> str:
        return ' class="text"' if column in text_columns else ""

    top = "".join(f"<th{kind(column)}>{escape(name)}</th>" for column, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{kind(column)}>{cell}</td>" for column, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def runs(all_runs: Sequence[Run]) -> str:
    """Return the table that compares all runs."""
    head = [
        "run",
        "offered",
        "rate",
        "attainment",
        "goodput",
        "ttft p50",
        "ttft p99",
        "tpot p50",
        "tpot p99",
        "output",
        "send lag p99",
        "valid",
    ]
    rows = []
    for run in all_runs:
        steady = run["throughput"]["steady"] if run["throughput"] else {}
        rows.append(
            [
                escape(run["name"]),
                str(run["offered"]),
                _per_s(run["offered_rps"]),
                _share(run["attainment"]["joint"]),
                _estimate(run["goodput_rps"], _per_s),
                *(format_ms(_value(run, metric, key)) for metric in ("ttft", "tpot") for key in ("p50_ms", "p99_ms")),
                f"{format_number(steady.get('output_tokens_per_s'))} tok/s",
                format_ms(run["sending"]["lag_p99_ms"]),
                VERDICTS[run["verdict"]],
            ]
        )
    return table(head, rows)


def latency(run: Run) -> str:
    """Return the latency table with confidence intervals. The last column covers all offered requests."""
    rows = []
    for metric in LATENCY_ROWS:
        one = run["latency"].get(metric)
        if one:
            cells = [_estimate(one[key], format_ms) for key in ("mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms")]
            of_offered = [one["of_offered"].get(f"p{q}_ms", "–") for q in (50, 90, 99)]
            never = " · ".join(
                value if isinstance(value, str) else "∞" if value is None else format_ms(value) for value in of_offered
            )
            rows.append(
                [
                    f"<b>{metric}</b>",
                    str(one["count"]),
                    *cells,
                    format_ms(one["max_ms"]),
                    never if one["of_offered"] else "–",
                ]
            )
    return table(["", "count", "mean", "p50", "p90", "p95", "p99", "max", "of all offered: p50 · p90 · p99"], rows)


def groups(run: Run) -> str:
    """Return tables by class, tenant and endpoint. A table with a single group is left out, except the one by
    class."""
    parts = []
    for key, name in (("by_class", "class"), ("by_tenant", "tenant"), ("by_endpoint", "endpoint")):
        if len(run[key]) > 1 or key == "by_class":
            slos = run["slos"] if key == "by_class" else {}
            rows = [_group_row(group, slos.get(group["name"])) for group in run[key]]
            parts.append(table([name, "offered", "attainment", "ttft met", "tpot met", "goodput", *_SPREAD_HEAD], rows))
    return "".join(parts)


_SPREAD_HEAD = ("ttft p50", "ttft p99", "tpot p50", "tpot p99", "e2e p50", "e2e p99")


def _group_row(group: Mapping[str, Any], slo: Mapping[str, float] | None) -> list[str]:
    slo_text = ", ".join(f"{name.removesuffix('_ms')} {format_ms(bound)}" for name, bound in (slo or {}).items())
    attainment = group["attainment"]
    return [
        escape(group["name"]) + (f"<small>{slo_text}</small>" if slo_text else ""),
        str(group["offered"]),
        _share(attainment["joint"]),
        *(format_percent(attainment[name]["share"]) if name in attainment else "–" for name in ("ttft", "tpot")),
        _per_s(group["goodput_rps"]),
        *(_spread(group[f"{metric}_ms"], q) for metric in ("ttft", "tpot", "e2e") for q in ("p50", "p99")),
    ]


def workers(run: Run) -> str:
    """Return the tables of prefill and decode workers."""
    prefill = [
        [
            escape(one["worker"]),
            str(one["offered"]),
            _share(one["attainment"]["joint"]),
            _per_s(one["goodput_rps"]),
            *(_spread(one[key], q) for key in ("queue_ms", "prefill_ms") for q in ("p50", "p99")),
            format_percent(one["busy_share"]),
        ]
        for one in run["by_worker"]
        if one["role"] == "prefill"
    ]
    decode = [
        [
            escape(one["worker"]),
            str(one["offered"]),
            _share(one["attainment"]["joint"]),
            _per_s(one["goodput_rps"]),
            *(_spread(one[key], q) for key in ("handoff_ms", "tpot_ms") for q in ("p50", "p99")),
            format_bytes(one["kv_bytes"]),
            format_number(one["output_tokens"]),
        ]
        for one in run["by_worker"]
        if one["role"] != "prefill"
    ]
    common = ["requests", "attainment", "goodput"]
    return table(
        ["prefill", *common, "queue p50", "queue p99", "prefill p50", "prefill p99", "computing"], prefill
    ) + table(["decode", *common, "handoff p50", "handoff p99", "tpot p50", "tpot p99", "KV read", "tokens"], decode)


def errors(run: Run) -> str:
    """Return the table of errors."""
    rows = [
        [
            escape(one["outcome"].replace("_", " ")),
            str(one["count"]),
            "–" if one["status"] is None else str(one["status"]),
            escape(one["reason"]) or "–",
            escape(one["error"]) or "–",
        ]
        for one in run["errors"]
    ]
    return table(["class", "count", "status", "reason", "error"], rows, (0, 3, 4))


def rates(run: Run) -> str:
    """Return the tables of sent requests and send lag, of throughput, and of cache hits and handoffs."""
    sent, through, hits, handoff = run["sending"], run["throughput"], run["prefix_hits"], run["handoff"]
    sending = [
        ("requests due", str(sent["due"])),
        ("requests sent", str(sent["sent"])),
        ("due rate", _per_s(sent["due_rps"])),
        ("achieved rate", _per_s(sent["achieved_rps"])),
        ("send lag p50", format_ms(sent["lag_p50_ms"])),
        ("send lag p99", format_ms(sent["lag_p99_ms"])),
        ("send lag max", format_ms(sent["lag_max_ms"])),
        ("send lag limit (p99)", format_ms(sent["lag_limit_ms"])),
        ("priority used", str(run["machine"].get("priority") or "not recorded")),
    ]
    work = []
    if through:
        steady, raw = through["steady"], through["raw"]
        work = [
            ("steady window", f"{format_number(steady['from_s'])} to {format_number(steady['to_s'])} s"),
            *((_WORDS[key], _per_s(steady[key])) for key in _WORDS),
            (f"all of {format_number(raw['seconds'])} s: responses", _per_s(raw["requests_per_s"])),
            ("output tokens", _per_s(raw["output_tokens_per_s"])),
            ("tokens per message", format_number(run["tokens_per_message"])),
        ]
    prompts = run["prompts"]
    if prompts["requests"]:
        work += [
            ("prompt tokens, planned", f"{prompts['planned_tokens']:,}"),
            ("counted by the server", f"{prompts['counted_tokens']:,} ({prompts['deviation']:+.2%})"),
        ]
    inside = [
        ("prefix hits", format_percent(hits["achieved"])),
        *((name, format_percent(ratio)) for name, ratio in hits["best"].items()),
        (
            "cached of prompt tokens",
            f"{hits['cached_tokens']:,} of {hits['prompt_tokens']:,}" if hits["requests"] else "not reported",
        ),
        *((f"cached in {tier}", f"{tokens:,}") for tier, tokens in hits["by_tier"].items()),
    ]
    if handoff:
        inside += [
            ("requests handed off", str(handoff["requests"])),
            ("handoff p50", _spread(handoff["cost_ms"], "p50")),
            ("handoff p99", _spread(handoff["cost_ms"], "p99")),
            ("KV read", format_bytes(handoff["kv_bytes"])),
            ("of that before the end of prefill", format_percent(handoff["early_share"])),
            ("read throughput", f"{format_bytes(handoff['bytes_per_s'] or 0)}/s"),
        ]
    for metric in ("ttft", "tpot"):
        reported = run[f"predicted_to_actual_{metric}"]
        if reported:
            inside.append(
                (
                    f"predicted / actual {metric}: p10, p50, p90",
                    ", ".join(format_number(reported[key]) for key in ("p10", "p50", "p90")),
                )
            )
    return f'<div class="pairs">{_pairs(sending)}{_pairs(work)}{_pairs(inside)}</div>'


_WORDS = {
    "requests_per_s": "responses",
    "good_requests_per_s": "responses within their SLO",
    "output_tokens_per_s": "output tokens",
    "prompt_tokens_per_s": "prompt tokens",
}


def configuration(run: Run) -> str:
    """Return the tables of run, options, machine and server."""
    facts = {
        key: run[key]
        for key in ("plan_hash", "plan_name", "url", "protocol", "model", "started_at", "duration_s", "processes")
    }
    facts |= {key: run[key] for key in ("warmup_requests", "ignore_eos", "loadgen_version")}
    facts["slos"] = {name: slo for name, slo in run["slos"].items() if slo}
    facts |= {
        f"recheck: {key}": len(value) if isinstance(value, list) else value for key, value in run["check"].items()
    }
    boxes = [
        _pairs(pairs(data), name)
        for name, data in (
            ("Run", facts),
            ("Options", {key: value for key, value in run["flags"].items() if key not in IN_RUN}),
            ("Machine", {"priority used" if key == "priority" else key: one for key, one in run["machine"].items()}),
            ("Server", run["server"]),
        )
    ]
    return f'<div class="pairs configuration">{"".join(boxes)}</div>'


def definitions(reported: Mapping[str, str]) -> str:
    """Return the collapsible table of metric definitions."""
    rows = [[f"<b>{escape(name)}</b>", escape(text)] for name, text in reported.items()]
    return f"<details><summary>Metric definitions</summary>{table(['', ''], rows, (0, 1))}</details>"


def _pairs(pairs: Sequence[tuple[str, str]], title: str = "") -> str:
    if not pairs:
        return ""
    head = f'<thead><tr><th colspan="2">{escape(title)}</th></tr></thead>' if title else ""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in pairs)
    return f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'


def _share(share: Mapping[str, Any]) -> str:
    interval = f"{format_percent(share['low'])} – {format_percent(share['high'])}"
    return f"{format_percent(share['share'])}<small>{interval}</small>"


def _estimate(estimate: Mapping[str, Any] | None, write: Any) -> str:
    if not estimate or estimate["value"] is None:
        return "–"
    if estimate["low"] is None:
        return str(write(estimate["value"]))
    high = f"– {write(estimate['high'])}" if estimate["high"] is not None else "or more"
    return f"{write(estimate['value'])}<small>{write(estimate['low'])} {high}</small>"


def _value(run: Run, metric: str, key: str) -> float | None:
    value: float | None = run["latency"][metric][key]["value"] if metric in run["latency"] else None
    return value


def _spread(spread: Mapping[str, Any] | None, q: str) -> str:
    return format_ms(spread[q]) if spread else "–"


def _per_s(value: float | None) -> str:
    return "–" if value is None else f"{format_number(value)}/s"
