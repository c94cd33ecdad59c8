"""Writes `capacity.json`: the result of a capacity search with all its trials. It is written after each
trial.

`loadgen_capacity` is the format version, 1. Fields are added, never changed. The head has the arguments
(`workload`, `unit` of its rate, `slos`, `confidence`, `resolution`, `seconds` and `requests` of a trial,
`seed`) and `notes` on limitations. `points` has one entry, or one for each point of a sweep:

    values, command   of the sweep; url, model, server, error, interrupted
    answers           for each goal: attainment, slo_scale (null if ttft_scale and tpot_scale differ), state,
                      capacity_rps, low_rps, high_rps, trials, why, held_rps (SLO met), broke_rps (SLO missed)
    trials            in order: directory, rate_rps, seconds, seed, is_scout, invalid, notes,
                      and judgements by goal
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen.capacity.capacity_search import CapacityEstimate
from loadgen.capacity.search_runner import SearchResult
from loadgen.capacity.trials import Goal, Trial
from loadgen.capacity.verdicts import Judgement
from loadgen.loadgen_errors import LoadgenError
from loadgen.send.server.server_process import SweepPoint

FORMAT = 1
NAME = "capacity.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """Result at one point of a sweep.

    - `command`: the command that started the server; empty if it was already running
    - `error`: why there are no results, in addition to the error of `found`
    """

    point: SweepPoint
    found: SearchResult | None = None
    command: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def write_capacity(directory: Path, head: Mapping[str, Any], points: Sequence[PointResult]) -> None:
    """Write capacity.json atomically. Raises LoadgenError."""
    data = {"loadgen_capacity": FORMAT, **head, "points": [_point(point) for point in points]}
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=directory, prefix=".capacity-", delete=False, encoding="utf-8"
        ) as file:
            json.dump(data, file, indent=1, ensure_ascii=False, allow_nan=False, default=str)
            file.write("\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, directory / NAME)
    except OSError as error:
        raise LoadgenError(f"{directory / NAME} cannot be written: {error.strerror or error}") from error


def _point(point: PointResult) -> dict[str, Any]:
    found = point.found
    return {
        "name": point.point.name,
        "values": dict(point.point.values),
        "command": list(point.command),
        **point.facts,
        "error": point.error or (found.error if found else ""),
        "interrupted": bool(found and found.is_interrupted),
        "answers": [_answer(goal, answer) for goal, answer in zip(found.goals, found.answers, strict=True)]
        if found
        else [],
        "trials": [_trial(trial) for trial in found.trials] if found else [],
    }


def _answer(goal: Goal, answer: CapacityEstimate) -> dict[str, Any]:
    return {
        "attainment": goal.target,
        "slo_scale": goal.slo_scale.uniform,
        "ttft_scale": goal.slo_scale.ttft,
        "tpot_scale": goal.slo_scale.tpot,
        "state": answer.state.value,
        "capacity_rps": answer.capacity_rps,
        "low_rps": answer.interval.low if answer.interval else None,
        "high_rps": answer.interval.high if answer.interval else None,
        "held_rps": answer.held_rps,
        "broke_rps": answer.broke_rps,
        "trials": answer.num_trials,
        "scouts": answer.num_scouts,
        "why": answer.why,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "directory": trial.directory,
        "rate_rps": trial.rate_rps,
        "seconds": trial.seconds,
        "duration_s": trial.duration_s,
        "seed": trial.seed,
        "is_scout": trial.is_scout,
        "is_cut": trial.ended_early,
        "interrupted": trial.is_interrupted,
        "goal": trial.goal,
        "invalid": list(trial.invalid),
        "notes": list(trial.notes),
        "judgements": [_judgement(judgement) for judgement in trial.judgements],
    }


def _judgement(judgement: Judgement) -> dict[str, Any]:
    return {
        "verdict": judgement.verdict.value,
        "good": judgement.num_good,
        "judged": judgement.num_judged,
        "open": judgement.num_open,
        "share": None if math.isnan(judgement.share) else judgement.share,
        "low": judgement.interval.low,
        "high": judgement.interval.high,
        "growth_rps": judgement.growth_rps,
        "is_overloaded": judgement.is_overloaded,
    }
