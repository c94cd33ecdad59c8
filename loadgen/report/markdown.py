"""Writes `report.md`: a short summary for an issue, a commit or a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loadgen.report.scales import format_ms, format_number, format_percent

VERDICTS = {"valid": "yes", "warm": "**WARM CACHE**", "invalid": "**INVALID**"}


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    runs = report["runs"]
    parts = [f"# loadgen: {_cell(runs[0]['name']) if len(runs) == 1 else f'{len(runs)} runs'}"]
    parts.append(_cell(report["headline"]))
    if len(runs) > 1:
        parts.append(_overview(runs))
    parts += [_run(run, is_only=len(runs) == 1) for run in runs]
    parts.append(
        "Latencies count from the intended send time unless the name ends in `_sent`. Brackets: 95 % intervals. "
        "Shares are of all offered "
        "requests."
    )
    return "\n\n".join(parts) + "\n"


def _overview(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            _cell(run["name"]),
            format_number(run["offered_rps"]),
            format_percent(run["attainment"]["joint"]["share"]),
            _estimate(run["goodput_rps"], format_number),
            *(format_ms(_of(run, metric, q)) for metric in ("ttft", "tpot") for q in ("p50_ms", "p99_ms")),
            VERDICTS[run["verdict"]],
        ]
        for run in runs
    ]
    return _table(
        [
            "run",
            "requests/s",
            "attainment",
            "goodput, requests/s",
            "ttft p50",
            "ttft p99",
            "tpot p50",
            "tpot p99",
            "valid",
        ],
        rows,
    )


def _run(run: Mapping[str, Any], *, is_only: bool) -> str:
    parts = [] if is_only else [f"## {_cell(run['name'])}"]
    if run["invalid"]:
        parts.append(
            "**INVALID RUN: do not quote these numbers.**\n"
            + "\n".join(f"- {_cell(reason)}" for reason in run["invalid"])
            + "".join(f"\n- Change: {_cell(remedy)}" for remedy in run["remedies"])
        )
    warm = run["warm_cache"]
    if warm["text"]:
        parts.append(f"**{_sentence(warm['text'])}**" if warm["state"] == "warm" else f"> {_sentence(warm['text'])}")
    parts += [f"> {_cell(note)}" for note in run["notes"]]
    if run["interrupted"]:
        parts.append("> Ended early.")
    slos = "; ".join(
        f"{_cell(name)} "
        + (", ".join(f"{key.removesuffix('_ms')} {format_ms(bound)}" for key, bound in slo.items()) or "none")
        for name, slo in run["slos"].items()
    )
    sent = run["sending"]
    parts.append(
        f"`{_cell(run['model'])}` at {_cell(run['url'])} over {run['protocol']}, plan {_cell(run['plan_name'])} "
        f"`{run['plan_hash'][:16]}`{' (' + _cell(run['offered_text']) + ')' if run['offered_text'] else ''}, "
        f"started {run['started_at']}. SLO: {slos or 'none'}. Send lag p99 {format_ms(sent['lag_p99_ms'])} "
        f"(limit {format_ms(sent['lag_limit_ms'])}), {format_number(sent['achieved_rps'])} of "
        f"{format_number(sent['due_rps'])} requests/s sent."
    )
    joint, goodput = run["attainment"]["joint"], run["goodput_rps"]
    parts.append(
        f"**{format_percent(joint['share'])} of {run['offered']} offered requests met their SLO** "
        f"[{format_percent(joint['low'])}, {format_percent(joint['high'])}]; goodput "
        f"{_estimate(goodput, format_number)} requests/s."
    )
    counted = {name: count for name, count in run["outcomes"].items() if count}
    parts.append(
        _table(
            [name.replace("_", " ") for name in counted] + ["offered"],
            [[*map(str, counted.values()), str(run["offered"])]],
        )
    )
    rows = [
        [
            metric,
            str(one["count"]),
            *(_estimate(one[key], format_ms) for key in ("mean_ms", "p50_ms", "p90_ms", "p99_ms")),
        ]
        for metric, one in run["latency"].items()
    ]
    if rows:
        parts.append(_table(["", "count", "mean", "p50", "p90", "p99"], rows))
    reported = list(_inside(run))
    if reported:
        parts.append("\n".join(f"- {line}" for line in reported))
    return "\n\n".join(parts)


def _inside(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with facts that the server reported."""
    prompts, hits, handoff = run["prompts"], run["prefix_hits"], run["handoff"]
    if prompts["deviation"]:
        counted = f"{prompts['counted_tokens']} tokens, {prompts['deviation']:+.2%} relative to the plan"
        yield f"Prompts: the server counted {counted}."
    if hits["achieved"] is not None:
        best = "".join(f"; {name} {format_percent(ratio)}" for name, ratio in hits["best"].items())
        yield f"Prefix hits: {format_percent(hits['achieved'])} of prompt tokens{best}."
    if handoff and handoff["cost_ms"]:
        cost = handoff["cost_ms"]
        yield f"Handoff: p50 {format_ms(cost['p50'])}, p99 {format_ms(cost['p99'])} of {cost['count']} requests."
    for metric in ("ttft", "tpot"):
        ratio = run[f"predicted_to_actual_{metric}"]
        if ratio:
            p50, p90 = format_number(ratio["p50"]), format_number(ratio["p90"])
            yield f"Predicted / actual {metric}: p50 {p50}, p90 {p90} of {ratio['requests']} requests."


def _of(run: Mapping[str, Any], metric: str, key: str) -> float | None:
    value: float | None = run["latency"][metric][key]["value"] if metric in run["latency"] else None
    return value


def _estimate(estimate: Mapping[str, Any] | None, write: Any) -> str:
    if not estimate or estimate["value"] is None:
        return "–"
    if estimate["low"] is None:
        return str(write(estimate["value"]))
    high = "…" if estimate["high"] is None else write(estimate["high"])
    return f"{write(estimate['value'])} [{write(estimate['low'])}, {high}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        "| " + " | ".join(head) + " |",
        "| --- |" + " ---: |" * (len(head) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return f"{_cell(text[:1].upper() + text[1:])}."


def _cell(text: str) -> str:
    """Return text that cannot break out of its Markdown cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
