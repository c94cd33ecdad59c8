"""Finds which SLO bounds complete responses missed, and in which stage those responses spent most time."""

from __future__ import annotations

from typing import Any

import numpy as np

from loadgen.measure.measures import SLOS
from loadgen.report.critical_path import STAGES, mean_path
from loadgen.report.run_view import RunView

BEFORE_FIRST_TOKEN = tuple(STAGES)[: tuple(STAGES).index("exposed transfer")]
AFTER_FIRST_TOKEN = ("exposed transfer", "admission", "first decode step", "decode")
BLAMED = {
    "ttft": BEFORE_FIRST_TOKEN,
    "tpot": AFTER_FIRST_TOKEN,
    "e2e": (*BEFORE_FIRST_TOKEN, *AFTER_FIRST_TOKEN),
}
"""Stages that can cause a miss of each bound."""


def misses(run: RunView) -> list[dict[str, Any]]:
    """Return {slo, missed, share of offered, stage, stage_share} for each missed bound, most missed first.

    `stage` has the largest mean time among those responses; None if the server reports no timeline.
    `stage_share` is its share of the time of all stages that can cause the miss.
    """
    measures, found = run.measures, []
    complete = measures.complete
    for slo in SLOS:
        rows = [int(row) for row in np.flatnonzero(complete & measures.has_slo[slo] & ~measures.met[slo])]
        if not rows:
            continue
        stage, stage_share = _main_stage(run, slo, rows)
        share = len(rows) / len(measures)
        found.append({"slo": slo, "missed": len(rows), "share": share, "stage": stage, "stage_share": stage_share})
    return sorted(found, key=lambda one: -one["missed"])


def _main_stage(run: RunView, slo: str, rows: list[int]) -> tuple[str | None, float | None]:
    measures = run.measures
    traced = [row for row in rows if measures.stages[row].prefill_s is not None]
    if not traced:
        return None, None
    path = {stage: seconds for stage, seconds in mean_path(measures, traced).items() if stage in BLAMED[slo]}
    total = sum(path.values())
    if total <= 0:
        return None, None
    stage = max(path, key=lambda one: path[one])
    return stage, path[stage] / total
