"""Implements `loadgen compare`: compares two runs and fails on a regression."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.commands.option_types import SloOf
from loadgen.measure.compare import Change, Comparison, ComparisonVerdict, RegressionBound, compare, regressions
from loadgen.measure.records_file import read_result
from loadgen.measure.request_metrics import OutcomeRules
from loadgen.measure.result_plan import cache_of
from loadgen.report.scales import format_ms, format_number, format_percent
from loadgen.slo_target import SloTarget, override_slos

EXIT_REGRESSION = 1
EXIT_UNDECIDED = 2
WARM = "a run's cache was warm"
WIDTH = 110
"""Table width in columns if standard output is not a terminal."""
STYLES = {
    ComparisonVerdict.BETTER: "bold green",
    ComparisonVerdict.WORSE: "bold red",
    ComparisonVerdict.SAME: "dim",
    ComparisonVerdict.UNKNOWN: "yellow",
    ComparisonVerdict.WARM: "bold yellow",
}


class Percent(click.ParamType):
    """Click type for a percentage, `5%` or `5`, returned as 0.05."""

    name = "percent"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            share = float(str(value).strip().removesuffix("%")) / 100
        except ValueError:
            self.fail(f"`{value}` is not a percentage; write 5%", param, ctx)
        if not 0 <= share < math.inf:
            self.fail(f"`{value}` must be finite and not negative", param, ctx)
        return share


@click.command("compare")
@click.argument("before", type=click.Path(path_type=Path), metavar="A")
@click.argument("after", type=click.Path(path_type=Path), metavar="B")
@click.option(
    "--max-regression",
    type=Percent(),
    help="Fail if any metric of B is worse than A's by more than this.  [default: 5%, without --fail-if]",
)
@click.option(
    "--fail-if",
    "thresholds",
    multiple=True,
    metavar="TEXT",
    help="Fail if the observed change crosses this bound: 'ttft_p50 > +5%', 'attainment < -1pp', …. Repeatable.",
)
@click.option("--unpaired", is_flag=True, help="Also compare runs of different plans, as two independent samples.")
@click.option(
    "--slo",
    "slos",
    multiple=True,
    type=SloOf(),
    metavar="[CLASS:]SLO",
    help="Evaluate both runs against this SLO instead of A's.",
)
@click.option("--allow-invalid", is_flag=True, help="Decide even if a run is invalid.")
@click.option("--allow-warm", is_flag=True, help="Decide even if a run began with a warm prefix cache.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(
    ctx: click.Context,
    before: Path,
    after: Path,
    max_regression: float | None,
    thresholds: tuple[str, ...],
    unpaired: bool,
    slos: tuple[tuple[str | None, SloTarget], ...],
    allow_invalid: bool,
    allow_warm: bool,
    is_json: bool,
) -> None:
    """Compare two results of `loadgen run`, request by request: B against A.

    A metric counts as changed only if the 95 % interval of its difference excludes zero. --max-regression
    fails for metrics that are worse by more than it allows. --fail-if fails for the observed change, whatever
    its interval.

    A run with more prefix hits than its plan allows from an empty cache began with a warm cache. It is never
    called better than the other, nor the other worse, unless --allow-warm is given.

    \b
    Exit codes: 0 no regression, 1 a regression, 2 nothing was decided (bad arguments, different plans,
    an invalid run, a warm cache, or a --fail-if metric that a run has no value for).
    """
    limits = [RegressionBound.parse(text) for text in thresholds]
    first, second = read_result(before), read_result(after)
    rules = OutcomeRules(slos=override_slos(first.run.slos, slos)) if slos else None
    caches = (cache_of(first), cache_of(second))
    found = compare(first, second, caches=caches, allow_warm=allow_warm, unpaired=unpaired, rules=rules)
    allowed = 0.05 if max_regression is None and not limits else max_regression
    failed = (
        []
        if allowed is None
        else [f"{change.metric} is worse by {abs(change.relative):.1%}" for change in regressions(found, allowed)]
    )
    failed += [limit.text for limit in limits if limit.is_crossed(found)]
    undecided = {
        limit.text: WARM if limit.has_value(found) else "a run has no value for it"
        for limit in limits
        if limit.is_crossed(found) is None
    }
    if allowed is not None and found.is_withheld(allowed):
        undecided[f"whether B is worse by more than {allowed:.1%}"] = WARM
    if is_json:
        click.echo(
            json.dumps(
                {**found.to_json(), "failed": failed, "undecided": list(undecided)}, indent=1, ensure_ascii=False
            )
        )
    else:
        _print(found, failed, undecided)
    if found.invalid and not allow_invalid:
        ctx.exit(EXIT_UNDECIDED)
    ctx.exit(EXIT_REGRESSION if failed else EXIT_UNDECIDED if undecided else 0)


def _print(found: Comparison, failed: list[str], undecided: Mapping[str, str]) -> None:
    """Print the comparison. `undecided`: the reason of each."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    for reason in found.invalid:
        console.print(Text(f"INVALID {reason}", style="bold red"), soft_wrap=True)
    for text in found.warm_texts:
        console.print(Text(text, style="bold yellow"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    console.print(
        Text(f"A  {found.before}\nB  {found.after}\n{'paired by request' if found.is_paired else 'unpaired'}"),
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("metric", no_wrap=True)
    for name in ("A", "B", "B - A", "95 % interval", "change", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("B is", no_wrap=True)
    for change in found.changes:
        table.add_row(
            change.metric,
            *(_written(change, value) for value in (change.before, change.after)),
            _difference(change, change.difference),
            _interval(change),
            f"{change.relative:+.1%}" if math.isfinite(change.relative) else "–",
            str(change.count),
            Text(str(change.verdict), style=STYLES[change.verdict]),
        )
    console.print(table)
    if found.invalid:
        console.print(Text("An invalid run decides nothing; --allow-invalid overrides this.", style="bold red"))
    if found.warm.before or found.warm.after:
        console.print(Text("A warm run is not called better; --allow-warm overrides this.", style="bold yellow"))
    for reason in failed:
        console.print(Text(f"regression: {reason}", style="bold red"))
    for text, reason in undecided.items():
        console.print(Text(f"undecided: {text}: {reason}", style="bold yellow"))
    if not failed and not undecided:
        console.print("no regression")


def _written(change: Change, value: float) -> str:
    if change.metric == "attainment":
        return format_percent(value)
    return f"{format_number(value)}/s" if change.metric == "goodput" else format_ms(value * 1e3)


def _difference(change: Change, value: float) -> str:
    if not math.isfinite(value):
        return "–"
    sign = "+" if value > 0 else ""
    return f"{sign}{value * 100:.2f} pp" if change.metric == "attainment" else sign + _written(change, value)


def _interval(change: Change) -> str:
    if change.interval is None:
        return "–"
    high = "…" if change.interval.high is None else _difference(change, change.interval.high)
    return f"{_difference(change, change.interval.low)} to {high}"
