"""Implements `loadgen report`: writes reports of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from loadgen.commands.option_types import SloOf
from loadgen.machine import loadgen_version
from loadgen.report.run_view import RunView
from loadgen.report.scales import format_number, format_percent
from loadgen.report.write import views_of, write_report
from loadgen.slo_target import SloTarget


@click.command("report")
@click.argument("results", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="DIR...")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory to write to.  [default: DIR, or the common parent of several]",
)
@click.option(
    "--slo",
    "slos",
    multiple=True,
    type=SloOf(),
    metavar="[CLASS:]SLO",
    help="Evaluate against this SLO instead of the run's.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of workers or GPUs, for goodput per worker.  [default: as recorded in the run]",
)
@click.option(
    "--kv-tokens",
    type=click.IntRange(min=1),
    help="KV cache size of the whole server in tokens.  [default: as recorded in the run]",
)
def command(
    results: tuple[Path, ...],
    out: Path | None,
    slos: tuple[tuple[str | None, SloTarget], ...],
    workers: int | None,
    kv_tokens: int | None,
) -> None:
    """Write report.html (self-contained), report.json, requests.csv and report.md for results of `loadgen
    run`.

    Several results are drawn together: goodput by rate if they differ in rate, and every curve side by side.
    """
    runs = views_of(results, slos=slos, workers=workers, kv_tokens=kv_tokens)
    directory = out or _common_parent(results)
    paths = write_report(runs, directory, loadgen_version())
    console = Console(highlight=False, soft_wrap=True)
    for run in runs:
        console.print(_line(run))
        for reason in run.invalid:
            console.print(Text(f"  INVALID: {reason}", style="bold red"))
        if run.cache.is_warm:
            console.print(Text(f"  {run.cache.text}", style="bold yellow"))
    console.print(f"wrote {', '.join(str(path) for path in paths)}")


def _common_parent(results: Sequence[Path]) -> Path:
    """Return the default output directory. Raises UsageError if the results have different parents."""
    if len(results) == 1:
        return results[0]
    parents = {path.resolve().parent for path in results}
    if len(parents) > 1:
        raise click.UsageError(
            f"the results are in {len(parents)} different directories; name the report's directory with --out"
        )
    return parents.pop()


def _line(run: RunView) -> Text:
    summary = run.summary
    counted = " + ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in summary.outcomes.items() if count)
    goodput = (
        f", goodput {format_number(summary.goodput_rps.value)} of {format_number(summary.offered_rps)} requests/s"
        if summary.goodput_rps
        else ""
    )
    return Text(
        f"{run.name}: {counted} = {summary.offered} offered; SLO attainment "
        f"{format_percent(summary.joint.value)}{goodput}"
    )
