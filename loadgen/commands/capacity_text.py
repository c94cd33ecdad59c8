"""Terminal output of `loadgen capacity`: trial lines, tables and the resulting capacities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from loadgen.capacity.capacity_file import PointResult
from loadgen.capacity.capacity_search import CapacityEstimate, State
from loadgen.capacity.search_runner import SearchResult
from loadgen.capacity.trials import Goal, Trial, TrialLength
from loadgen.capacity.verdicts import Judgement, TrialVerdict, session_s
from loadgen.plan.plan import Plan
from loadgen.slo_target import UNSCALED

STEADY_SESSIONS = 2.0
"""Shortest trial in session lengths. From then on half of the trial runs with the full number of sessions."""
VERDICTS = {TrialVerdict.MET: "SLO met", TrialVerdict.MISSED: "SLO missed", TrialVerdict.UNDECIDED: "undecided"}
STYLES = {TrialVerdict.MET: "green", TrialVerdict.MISSED: "red", TrialVerdict.UNDECIDED: ""}


def trial_line(trial: Trial, unit: str, goals: tuple[Goal, ...]) -> str:
    """Return the line printed when a trial ends. Its verdict is that of the goal that requested the trial."""
    judgement = trial.judgements[trial.goal]
    goal = f" ({goals[trial.goal].name})" if len(goals) > 1 else ""
    verdict = "interrupted" if trial.is_interrupted else _verdict_text(judgement)
    if trial.invalid:
        verdict = f"INVALID: {trial.invalid[0].partition(';')[0]}"
    notes = "".join(f"; {note}" for note in trial.notes)
    early = ", ended early" if trial.is_shortened else ""
    share = f"{_share(judgement)} of {judgement.num_judged}{goal}"
    return f"{trial.directory:<24} {trial.rate_rps:>7g} {unit}/s  {share}  {verdict}{early}{notes}"


def short_trials(plan: Plan, length: TrialLength) -> Iterator[str]:
    """Yield a warning if trials are too short for the plan's sessions."""
    lasts_s = session_s(plan)
    if length.seconds < STEADY_SESSIONS * lasts_s:
        yield (
            f"the 90th percentile of session lengths is {lasts_s:.0f} s, but trials last {length.seconds:g} s: "
            "most later turns fall after "
            "the end of a trial, so the capacity will be overestimated; give --seconds "
            f"{math.ceil(STEADY_SESSIONS * lasts_s)} or more"
        )


def unreachable_goals(plan: Plan, goals: Sequence[Goal], max_model_len: int | None) -> Iterator[str]:
    """Yield a warning if so many requests can never meet their SLO that a goal cannot be reached at any
    rate."""
    too_long = (
        {request.index for request in plan.longer_than(max_model_len)} if max_model_len is not None else set[int]()
    )
    cancelling = {request.index for request in plan.requests if request.cancel_after_tokens is not None}
    share = len(too_long | cancelling) / len(plan.requests)
    unreachable = [goal for goal in goals if share > 1 - goal.target]
    if unreachable:
        reasons = [f"{len(cancelling)} cancel early"] if cancelling else []
        reasons += [f"{len(too_long)} exceed the server's max_model_len of {max_model_len} tokens"] if too_long else []
        yield (
            f"of {len(plan.requests)} requests, {' and '.join(reasons)}: "
            f"a share of {unreachable[0].target:.4g} cannot meet the SLO at any rate"
        )


def trials_table(found: SearchResult, unit: str) -> Table:
    """Return a table of the valid full-length trials by rate, with the attainment for each goal."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(f"{unit}/s", justify="right")
    for goal in found.goals:
        table.add_column(f"attainment, goal {goal.name}", justify="right")
        table.add_column("95 % interval", justify="center")
        table.add_column("")
    table.add_column("in flight", justify="right")
    table.add_column("trial", style="dim")
    trials = [trial for trial in found.trials if not trial.is_scout and not trial.invalid and not trial.is_interrupted]
    for trial in sorted(trials, key=lambda trial: trial.rate_rps):
        cells: list[str | Text] = [f"{trial.rate_rps:g}"]
        for judgement in trial.judgements:
            cells += [
                _share(judgement),
                _interval(judgement),
                Text(_verdict_text(judgement), style=STYLES[judgement.verdict]),
            ]
        table.add_row(*cells, f"{trial.judgements[0].growth_rps:+.2f}/s", trial.directory)
    return table


def points_table(points: list[PointResult], unit: str) -> Table:
    """Return a table of the capacities of a sweep's points."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    goals = next((point.found.goals for point in points if point.found), ())
    for goal in goals:
        table.add_column(f"{unit}/s at {goal.name}", justify="right")
        table.add_column("interval", justify="center")
    for point in points:
        cells = [point.point.name]
        for answer in point.found.answers if point.found else ():
            low_high = f"[{answer.interval.low:.3g}, {answer.interval.high:.3g}]" if answer.interval else ""
            cells += ["-" if answer.capacity_rps is None else f"{answer.capacity_rps:.3g}", low_high]
        table.add_row(*cells)
    return table


def answer_lines(point: PointResult, unit: str, confidence: float, resolution: float) -> Iterator[tuple[str, str]]:
    """Yield the result lines of one point as (text, style).

    Each goal has one line that begins with `capacity`.
    """
    where = f"{point.point.name}: " if point.point.values else ""
    if point.error:
        yield f"{where}{point.error}", "red"
    if point.found is None:
        return
    if point.found.error:
        yield f"{where}the search ended early: {point.found.error}", "red"
    for goal, answer in zip(point.found.goals, point.found.answers, strict=True):
        for text, style in _of_goal(goal, answer, unit, confidence, resolution):
            yield where + text, style


def _of_goal(
    goal: Goal, answer: CapacityEstimate, unit: str, confidence: float, resolution: float
) -> Iterator[tuple[str, str]]:
    unit = {"requests": "req", "sessions": "sessions"}[unit]
    at = f"at {goal.target * 100:g} % joint attainment" + (
        "" if goal.slo_scale == UNSCALED else f" of the SLO x {goal.slo_scale}"
    )
    if answer.state is State.WIDE and answer.interval and answer.interval.high:
        width = answer.interval.high / answer.interval.low - 1
        yield (
            f"the interval is {width:.0%} wide instead of {resolution:.0%}; more --max-trials or longer --seconds "
            "make it narrower",
            "yellow",
        )
    if answer.state is State.STOPPED:
        yield f"stopped: {answer.why}", "yellow"
    if answer.state is State.ABOVE:
        yield f"capacity above {answer.held_rps:.3g} {unit}/s {at}: the SLO was met at the highest allowed rate", ""
    elif answer.state is State.BELOW:
        yield (
            f"capacity below {answer.broke_rps:.3g} {unit}/s {at}: the SLO was missed at the lowest rate that "
            "trials of this length can judge",
            "",
        )
    elif answer.capacity_rps is not None and answer.interval is not None:
        yield (
            f"capacity {answer.capacity_rps:.3g} {unit}/s [{answer.interval.low:.3g}, {answer.interval.high:.3g}] {at} "
            f"({confidence * 100:g} % confidence, {answer.num_trials} trials)",
            "bold",
        )
    else:
        sides = [("met", answer.held_rps), ("missed", answer.broke_rps)]
        known = ", ".join(f"SLO {word} at {rate:.3g} {unit}/s" for word, rate in sides if rate is not None)
        yield f"capacity unknown {at}: " + (known or "no full-length trial was measured"), "red"


def _share(judgement: Judgement) -> str:
    return f"{judgement.share:6.1%}" if judgement.num_judged else "     -"


def _interval(judgement: Judgement) -> str:
    return f"[{judgement.interval.low:.1%}, {judgement.interval.high or 1.0:.1%}]"


def _verdict_text(judgement: Judgement) -> str:
    return VERDICTS[judgement.verdict] + (", backlog grew" if judgement.is_overloaded else "")
