"""Figures of one run: time series, sample requests, and the critical path by load."""

from __future__ import annotations

from typing import Any

import numpy as np

from loadgen.measure import request_metrics
from loadgen.measure.measures import Measures
from loadgen.measure.request_metrics import COMPLETE, RequestOutcome
from loadgen.measure.stats import Floats
from loadgen.report.critical_path import STAGES, path_by_load, path_of
from loadgen.report.drawing.figure import Figure, axis, lines, series_of, spans
from loadgen.report.drawing.figures import outcome_label, slo_marks, stacked
from loadgen.report.run_view import RunView
from loadgen.report.scales import nice

BINS = 60
DOTS = 1500
MOST_OF_PATH = 0.5
"""Share of the critical path above which decoding hides the other stages."""
PER_GROUP = 7
PER_OTHER_CLASS = 2


def of_run(run: RunView) -> list[Figure]:
    """Return the figures of one run."""
    figures = [rates(run), in_flight(run), ttft_over_time(run), waterfall(run), *critical_path(run)]
    return [figure for figure in figures if figure.get("series") or figure.get("rows")]


def rates(run: RunView) -> Figure:
    """Return offered and completed requests per second over time."""
    columns = run.measures.columns
    edges = _edges(columns["intended"], columns["ended"])
    width = float(edges[1] - edges[0])
    middles = (edges[:-1] + edges[1:]) / 2

    def per_second(times: Floats) -> list[list[float]]:
        counts, _ = np.histogram(times, edges)
        return [[float(x), float(count) / width] for x, count in zip(middles, counts, strict=True)]

    ended = columns["ended"]
    answered = run.measures.complete
    series = [
        series_of("offered", "offered", "area", per_second(columns["intended"])),
        series_of("completed", "o-good-line", "line", per_second(ended[answered])),
    ]
    if (~answered).any():
        series.append(series_of("ended otherwise", "o-failed-line", "line", per_second(ended[~answered])))
    return _over_time(
        run, "rates", "Offered and completed", f"Requests per second, in steps of {width:g} s.", "requests/s", series
    )


def in_flight(run: RunView) -> Figure:
    """Return the number of requests in flight over time."""
    columns = run.measures.columns
    edges = _edges(columns["intended"], columns["ended"])
    due, ended = np.sort(columns["intended"]), np.sort(columns["ended"])
    counts = np.searchsorted(due, edges, side="right") - np.searchsorted(ended, edges, side="right")
    points = [[float(x), float(count)] for x, count in zip(edges, counts, strict=True)]
    caption = "Requests that were due and had not ended. A line that keeps rising means that the server is overloaded."
    return _over_time(
        run, "in-flight", "In flight", caption, "requests", [series_of("in flight", run.color, "area", points)]
    )


def ttft_over_time(run: RunView) -> Figure:
    """Return the TTFT of at most `DOTS` requests, including the slowest."""
    measures = run.measures
    rows = np.flatnonzero(~np.isnan(measures.columns["ttft"]))
    if rows.size > DOTS:
        order = rows[np.argsort(measures.columns["ttft"][rows])]
        rows = np.sort(np.concatenate((order[-DOTS // 5 :], order[: -DOTS // 5][:: -(-order.size // DOTS)])))
    points = [[float(measures.columns["intended"][row]), float(measures.columns["ttft"][row]) * 1e3] for row in rows]
    names = [
        f"request {measures.records[row].index}, {outcome_label(measures.outcomes[row])}: {y:.4g} ms"
        for row, (_, y) in zip(rows, points, strict=True)
    ]
    classes = [f"o-{measures.outcomes[row]}" for row in rows]
    figure = _over_time(
        run,
        "ttft-time",
        "Time to first token, request by request",
        "By intended send time, coloured by outcome. A stall shows as a falling line of dots.",
        "ttft",
        [series_of("requests", "dots", "dots", points, names=names, classes=classes)],
    )
    figure["marks"] = slo_marks([run], "ttft", on="y")
    values = [point[1] for point in points]
    figure["y"] = axis("ttft", "ms", values, is_log=True)
    return figure


def critical_path(run: RunView) -> list[Figure]:
    """Return the critical path by load, and without decoding if that takes most of the time."""
    loads = path_by_load(run.measures)
    decode_s = sum(load.stages.get("decode", 0.0) for load in loads)
    hides_rest = decode_s > MOST_OF_PATH * sum(sum(load.stages.values()) for load in loads)
    names = [
        f"{load.low} in flight" if load.low == load.high else f"{load.low}–{load.high} in flight" for load in loads
    ]
    names = [f"{name} · {load.count}" for name, load in zip(names, loads, strict=True)]
    found = []
    for figure_id, title, leaves_out in (
        ("path", "Critical path by load", ""),
        ("head", "Critical path by load, up to decoding", "decode"),
    ):
        if leaves_out and not hides_rest:
            continue
        rows = [
            stacked(name, {stage: seconds for stage, seconds in load.stages.items() if stage != leaves_out})
            for name, load in zip(names, loads, strict=True)
        ]
        found.append(
            spans(
                f"{figure_id}-{run.number}",
                title,
                "Mean time of complete responses in each stage, by number of other requests in flight when due · "
                "number of responses.",
                axis("mean milliseconds", "ms", [row["spans"][-1]["to"] for row in rows], min=0.0),
                rows,
                list(STAGES),
            )
        )
    return found


def waterfall(run: RunView) -> Figure:
    """Return the stages of sample requests.

    The sample has the slowest complete responses by TTFT and by e2e, those in the middle by TTFT, and the
    longest requests of every other outcome.
    """
    measures = run.measures
    complete = np.flatnonzero(measures.complete)

    def slowest_first(metric: str) -> list[int]:
        return [int(row) for row in complete[np.argsort(-measures.columns[metric][complete], kind="stable")]]

    by_ttft, by_e2e = slowest_first("ttft"), slowest_first("e2e")
    middle = max(0, len(by_ttft) // 2 - PER_GROUP // 2)
    chosen = dict.fromkeys([*by_ttft[:PER_GROUP], *by_e2e[:PER_GROUP], *by_ttft[middle : middle + PER_GROUP]])
    rows = [_request(run, row) for row in [*chosen, *_others(measures)]]
    rows = [row for row in rows if row["spans"]]
    ends = [span["to"] for row in rows for span in row["spans"] if row["is_complete"]]
    ends = ends or [span["to"] for row in rows for span in row["spans"]]
    for row in rows:  # cut requests that hung for minutes, which would compress the others
        row["spans"] = [span | {"to": min(span["to"], max(ends))} for span in row["spans"] if span["from"] < max(ends)]
        row.pop("is_complete")
    return spans(
        f"waterfall-{run.number}",
        "Stages of single requests",
        "The slowest by TTFT, the slowest by e2e, and some from the middle; then the longest of every other "
        "outcome. Each from its "
        "intended send; request number · prompt + output tokens. White line: first token.",
        axis("since the intended send", "ms", ends, min=0.0),
        rows,
        list(STAGES),
        row_height=20,
        is_wide=True,
    )


def _others(measures: Measures) -> list[int]:
    found: list[int] = []
    for outcome in RequestOutcome:
        rows = [row for row, one in enumerate(measures.outcomes) if one is outcome and outcome not in COMPLETE]
        rows.sort(key=lambda row: measures.records[row].intended_s - measures.records[row].ended_s)
        found += rows[:PER_OTHER_CLASS]
    return found


def _request(run: RunView, row: int) -> dict[str, Any]:
    record, outcome = run.measures.records[row], run.measures.outcomes[row]
    parts, at = list[dict[str, Any]](), 0.0
    for stage, seconds in path_of(record, run.measures.stages[row]):
        parts.append({"name": stage, "color": STAGES[stage], "from": at, "to": at + seconds * 1e3})
        at += seconds * 1e3
    ended_ms = (record.ended_s - record.intended_s) * 1e3
    if outcome not in COMPLETE and ended_ms > at:
        parts.append(
            {"name": "no complete response", "color": STAGES["no complete response"], "from": at, "to": ended_ms}
        )
    ttft = request_metrics.ttft_s(record)
    marks = (
        [{"at": ttft * 1e3, "name": f"first token after {ttft * 1e3:.4g} ms", "color": "first"}]
        if ttft is not None
        else []
    )
    num_prompt_tokens = record.num_prompt_tokens or record.planned_prompt_tokens or "?"
    tokens = f"{num_prompt_tokens} + {request_metrics.num_output_tokens(record)}"
    return {
        "name": f"#{record.index} · {tokens}",
        "spans": parts,
        "marks": marks,
        "note": "" if outcome is RequestOutcome.GOOD else outcome_label(outcome),
        "is_complete": outcome in COMPLETE,
    }


def _over_time(
    run: RunView, figure_id: str, title: str, caption: str, unit: str, series: list[dict[str, Any]]
) -> Figure:
    xs = [point[0] for one in series for point in one["points"]]
    ys = [point[1] for one in series for point in one["points"]]
    high = max(ys, default=1.0) * 1.08 or 1.0
    return lines(
        f"{figure_id}-{run.number}",
        title,
        caption,
        axis("since the start of the run", "s", xs, from_zero=True),
        axis(unit, "", ys, min=0.0, max=high),
        series,
        is_wide=True,
        height=210,
    )


def _edges(due: Floats, ended: Floats) -> Floats:
    """Return at most `BINS` time steps of a round length, from the first due time to the last end.

    It ends soon after the last due time, even if a few requests hang.
    """
    start = float(due.min())
    span = float(due.max()) - start
    end = min(float(ended.max()), float(due.max()) + max(0.5 * span, 5.0))
    width = nice(max(end - start, 0.01) / BINS)
    first = np.floor(start / width) * width
    return np.asarray(first + width * np.arange(int(np.ceil((end - first) / width)) + 1), dtype=np.float64)
