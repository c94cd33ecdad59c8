"""Options, output and exit codes of `loadgen capacity`. `capacity_job` does the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from loadgen.capacity.capacity_file import NAME, PointResult
from loadgen.capacity.search_runner import is_answered
from loadgen.commands.capacity_job import TRIALS, CapacityJob
from loadgen.commands.capacity_text import answer_lines, points_table, trials_table
from loadgen.commands.option_types import Above, Numbers, Seconds, SloScales
from loadgen.commands.run_command import EXIT_INTERRUPTED
from loadgen.commands.target_options import sending_options, target_options

EXIT_ERROR = 2
EXIT_UNKNOWN = 3
PERCENTS = Numbers(0, 100, of=100)


@click.command("capacity", context_settings={"allow_interspersed_args": False})
@click.argument("workload", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--input-tokens", type=click.IntRange(1), help="Tokens of each prompt; only without WORKLOAD.  [default: 128]"
)
@click.option(
    "--output-tokens", type=click.IntRange(1), help="Tokens of each response; only without WORKLOAD.  [default: 32]"
)
@click.option(
    "--attainment",
    type=PERCENTS,
    default="90",
    show_default=True,
    metavar="PERCENT,…",
    help="Share of all offered requests that must meet all bounds of their SLO.",
)
@click.option(
    "--slo-scale",
    type=SloScales(),
    default="1",
    show_default=True,
    metavar="X[:Y],…",
    help="Multiply all bounds of the SLO by X; or X:Y: its TTFT by X and its TPOT by Y.",
)
@click.option(
    "--seconds",
    type=Seconds(),
    default="60s",
    show_default=True,
    help="Time over which the requests of one trial arrive.",
)
@click.option(
    "--requests",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Extend trials at low rates until this many requests have arrived, to at most ten times --seconds.",
)
@click.option(
    "--confidence",
    type=PERCENTS,
    default="95",
    show_default=True,
    metavar="PERCENT",
    help="Confidence level of the reported interval.",
)
@click.option(
    "--resolution",
    type=PERCENTS,
    default="10",
    show_default=True,
    metavar="PERCENT",
    help="Stop when the interval is this narrow.",
)
@click.option(
    "--max-trials", type=click.IntRange(6), default=12, show_default=True, help="Most full-length trials for each goal."
)
@click.option("--time-limit", type=Seconds(), default="2h", show_default=True, help="Longest search for each server.")
@click.option(
    "--start-rate", type=Above(0.0), default=1.0, show_default=True, help="First rate; from there it doubles or halves."
)
@click.option("--max-rate", type=Above(0.0), help="Highest rate to try.")
@click.option(
    "--drain",
    type=Seconds(),
    default="60s",
    show_default=True,
    help="Longest wait between trials for the server to become idle.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Reproduce the plans of an earlier search, tokens included.  [default: random]",
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Draw prompt tokens or words from this tokenizer.")
@click.option(
    "--command",
    "template",
    metavar="COMMAND",
    help="Command that starts the server, such as 'baton up --prefill {p} --http-port {port}'.",
)
@click.option(
    "--sweep",
    metavar="NAMES=VALUES,…",
    help="Values for the placeholders in --command, one search each, such as p:d=1:1,1:2,2:1.",
)
@click.option(
    "--ready-within", type=Seconds(), default="5m", show_default=True, help="Longest start of the server of --command."
)
@target_options
@click.option(
    "--out", type=click.Path(path_type=Path), help="Directory for all results.  [default: loadgen-capacity-DATE]"
)
@sending_options
@click.option("--quiet", is_flag=True, help="Print the result only.")
@click.pass_context
def command(ctx: click.Context, **given: Any) -> None:
    """Find the highest open-loop request rate at which a given share of all offered requests meets its SLO.

    WORKLOAD is a source of `loadgen plan` with its arguments, except those for rate, time and seed.
    It comes last:

    \b
    loadgen capacity --slo ttft=500ms,tpot=50ms
    loadgen capacity --slo ttft=2s --attainment 90,99 --seconds 2m shared-prefix --prefixes 10
    loadgen capacity --slo ttft=1s --command 'baton up --prefill {p} --decode {d} --http-port {port}' --sweep p:d=1:1,1:2,2:1

    All results go into one directory: one result for each trial (`loadgen report DIR/trials/*`), and
    capacity.json.

    \b
    Exit codes: 0 every capacity was found, 2 an error occurred, 3 a capacity is still unknown,
    130 interrupted.
    """
    job = CapacityJob.of(given)
    points = job.run()
    _print_result(job, points)
    founds = [point.found for point in points]
    if any(found is not None and found.is_interrupted for found in founds):
        ctx.exit(EXIT_INTERRUPTED)
    if any(point.error or (point.found is not None and point.found.error) for point in points):
        ctx.exit(EXIT_ERROR)
    is_known = all(found is not None and all(map(is_answered, found.answers)) for found in founds)
    ctx.exit(0 if is_known else EXIT_UNKNOWN)


def _print_result(job: CapacityJob, points: list[PointResult]) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False)
    for point in points:
        if point.found is not None and point.found.trials:
            if point.point.values:
                console.print(point.point.name, style="bold")
            console.print(trials_table(point.found, job.maker.unit))
            console.print()
    if len(points) > 1:
        console.print(points_table(points, job.maker.unit))
        console.print()
    results = job.out / ("*/" if job.points[0].values else "") / TRIALS / "*"
    click.echo(f"result      {job.out / NAME}    loadgen report {results} --out report")
    lines = [
        line
        for point in points
        for line in answer_lines(point, job.maker.unit, job.confidence, job.limits[0].resolution)
    ]
    for text, style in sorted(lines, key=lambda line: "capacity " in line[0]):
        click.secho(text, fg=style if style in ("red", "yellow") else None, bold=style in ("red", "bold"))
