"""`loadgen report`: show what runs have measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from loadgen.commands.option_types import SloOf
from loadgen.machine import loadgen_version
from loadgen.report.run_view import RunView
from loadgen.report.scales import percent, short
from loadgen.report.write import views_of, write_report
from loadgen.slo_target import SloTarget


@click.command("report")
@click.argument("results", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="DIR...")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to write.  [default: DIR, or what holds them]",
)
@click.option(
    "--slo",
    "slos",
    multiple=True,
    type=SloOf(),
    metavar="[CLASS:]SLO",
    help="Judge by this promise instead of the run's.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="How many workers or GPUs share the goodput.  [default: as the run says]",
)
@click.option(
    "--kv-tokens",
    type=click.IntRange(min=1),
    help="How many tokens all its KV memory holds.  [default: as the run says]",
)
def command(
    results: tuple[Path, ...],
    out: Path | None,
    slos: tuple[tuple[str | None, SloTarget], ...],
    workers: int | None,
    kv_tokens: int | None,
) -> None:
    """Write report.html (one file that needs nothing else), report.json, requests.csv and report.md for
    results of `loadgen run`.

    Several results are drawn together: goodput by rate, where they differ in rate, and every curve side by
    side.
    """
    runs = views_of(results, slos=slos, workers=workers, kv_tokens=kv_tokens)
    directory = out or _holder(results)
    paths = write_report(runs, directory, loadgen_version())
    console = Console(highlight=False, soft_wrap=True)
    for run in runs:
        console.print(_line(run))
        for reason in run.invalid:
            console.print(Text(f"  INVALID: {reason}", style="bold red"))
    console.print(f"wrote {', '.join(str(path) for path in paths)}")


def _holder(results: Sequence[Path]) -> Path:
    """Raises UsageError where results lie too far apart for one place to be theirs."""
    if len(results) == 1:
        return results[0]
    parents = {path.resolve().parent for path in results}
    if len(parents) > 1:
        raise click.UsageError(f"the results lie in {len(parents)} directories: say by --out where the report goes")
    return parents.pop()


def _line(run: RunView) -> Text:
    summary = run.summary
    counted = " + ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in summary.outcomes.items() if count)
    goodput = (
        f", goodput {short(summary.goodput_rps.value)} of {short(summary.offered_rps)} requests/s"
        if summary.goodput_rps
        else ""
    )
    return Text(
        f"{run.name}: {counted} = {summary.offered} offered; attainment {percent(summary.joint.value)}{goodput}"
    )
