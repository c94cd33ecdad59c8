"""Implements `loadgen selftest`: measures and stores loadgen's own timing error."""

from __future__ import annotations

import click

from loadgen import machine
from loadgen.commands.option_types import Seconds
from loadgen.commands.run_command import EXIT_INVALID
from loadgen.send.run.priority import Priority
from loadgen.send.selftest import calibration
from loadgen.send.selftest.selftest import LIMIT_S, RATES, SelftestRate, selftest


@click.command("selftest")
@click.option("--seconds", type=Seconds(), default="5s", show_default=True, help="Duration of the trial at each rate.")
@click.option(
    "--output-tokens",
    type=click.IntRange(2),
    default=32,
    show_default=True,
    help="Tokens of each stream, one in each message.",
)
@click.option("--gap", type=Seconds(), default="20ms", show_default=True, help="Time between the tokens of a stream.")
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    help="Requests/s to try instead of the built-in series. Repeatable.",
)
@click.option(
    "--priority",
    type=click.Choice([p.value for p in Priority]),
    default="high",
    show_default=True,
    help="Scheduling priority of the sending process, as in `run`.",
)
@click.option(
    "--attempts", type=click.IntRange(1), default=3, show_default=True, help="Trials at each rate until one succeeds."
)
@click.option(
    "--require",
    type=click.FloatRange(0),
    default=0.0,
    help=f"Exit with {EXIT_INVALID} if the highest reliable rate is below this.",
)
@click.pass_context
def command(
    ctx: click.Context,
    seconds: float,
    output_tokens: int,
    gap: float,
    rates: tuple[float, ...],
    priority: str,
    attempts: int,
    require: float,
) -> None:
    """Measure loadgen's own timing error on this machine against a scripted server whose delays are known.

    Reports the highest rate at which one process stays accurate: the p99 of the send lag and of the delay of
    each event is at most 2 ms, and no request is dropped. `loadgen run` uses the result to warn when a plan
    needs more.
    """
    load = machine.load()
    click.echo(f"{machine.cpu_model()}, {machine.usable_cores()} cores, load average {load[0] if load else '?'}")
    click.echo(
        "  requests/s   achieved   dropped     send lag p50     p99     event p50      p99     CPU    per request"
    )
    found = selftest(
        seconds=seconds,
        output_tokens=output_tokens,
        gap_s=gap,
        rates=sorted(rates) or RATES,
        priority=Priority(priority),
        attempts=attempts,
        on_trial=lambda trial: click.echo(_row(trial)),
    )
    streams = f"requests/s of {output_tokens}-token streams in one process"
    if found is None:
        click.secho(
            f"the lowest rate already failed; this machine is too slow or too busy (load average {machine.load()})",
            fg="red",
            bold=True,
        )
        ctx.exit(EXIT_INVALID)
    try:
        click.echo(f"saved to {calibration.save(found)}")
    except OSError as error:
        click.secho(f"warning: the result cannot be saved for `loadgen run`: {error}", fg="yellow", err=True)
    passed = found.rate_rps >= require
    text = (
        f"timing is accurate (p99 error <= {LIMIT_S * 1e3:g} ms, no dropped request) up to {found.rate_rps:g} {streams}"
    )
    click.secho(text + ("" if passed else f"; {require:g} were required"), fg="green" if passed else "red", bold=True)
    ctx.exit(0 if passed else EXIT_INVALID)


def _row(trial: SelftestRate) -> str:
    lag, event = trial.lag_s, trial.event_s
    return (
        f"  {trial.rate_rps:10g} {trial.achieved_rps:10.1f} {trial.num_dropped:9d} {lag[0] * 1e3:13.2f} ms "
        f"{lag[1] * 1e3:6.2f}"
        f" {event[0] * 1e3:10.2f} ms {event[1] * 1e3:8.2f} {trial.cpu_share:7.0%} "
        f"{trial.cpu_per_request_s * 1e6:9.0f} us" + ("" if trial.passed else "   failed")
    )
