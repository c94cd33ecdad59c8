"""Implements `loadgen run`: sends a plan, prints a summary and sets the exit code."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from loadgen.commands.option_types import Above, Seconds
from loadgen.commands.target_options import (
    flags_of,
    processes_of,
    rates_warning,
    sending_options,
    server_facts,
    target_of,
    target_options,
)
from loadgen.loadgen_errors import LoadgenError
from loadgen.machine import usable_cores
from loadgen.measure.records_file import write_run
from loadgen.measure.request_metrics import OutcomeRules, lag_limit_s
from loadgen.plan.plan import Plan
from loadgen.plan.plan_file import read_plan
from loadgen.send.run.live import LiveView
from loadgen.send.run.priority import Priority
from loadgen.send.run.processes import Interrupted
from loadgen.send.run.run_plan import FinishedRun, RunSpec, run
from loadgen.slo_target import override_slos

SEED_BITS = 32
EXIT_INVALID = 3
EXIT_DIFFERS = 4
EXIT_INTERRUPTED = 130


@click.command("run")
@click.argument("plan", type=click.Path(path_type=Path), required=False)
@click.option("--rate", type=Above(0.0), help="Requests per second with Poisson arrivals; only without PLAN.")
@click.option("--seconds", type=Seconds(), help="Time over which requests arrive; only without PLAN.  [default: 30s]")
@click.option(
    "--input-tokens", type=click.IntRange(1), help="Tokens of each prompt; only without PLAN.  [default: 128]"
)
@click.option(
    "--output-tokens", type=click.IntRange(1), help="Tokens of each response; only without PLAN.  [default: 32]"
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Repeat the workload of an earlier run, prompts included; only without PLAN.  [default: a new one]",
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Draw prompt tokens or words from this tokenizer.")
@target_options
@click.option("--out", type=click.Path(path_type=Path), help="Directory for the result.  [default: loadgen-DATE-NAME]")
@sending_options
@click.option(
    "--check",
    "checks",
    is_flag=True,
    help="Afterwards repeat each request alone and count responses whose tokens differ.",
)
@click.option("--quiet", is_flag=True, help="Do not show the live view.")
@click.pass_context
def command(ctx: click.Context, **given: Any) -> None:
    """Send PLAN, a file of `loadgen plan`, to a server and record every response.

    The load is open-loop: every request is sent at its planned time, whatever the server does. Without PLAN,
    --rate generates one.

    \b
    Exit codes: 0 the run is valid, 2 an error occurred, 3 the run is invalid (for example, requests were sent
    late; the summary says which option to change), 4 --check found responses that differ or could not repeat
    the requests, 130 interrupted.
    The exit code does not say how well the server did: see `loadgen compare`.
    """
    if given["checks"] and dict(given["bodies"]).get("temperature"):
        raise click.UsageError(
            "--check compares repeated responses and needs greedy decoding; leave out --body temperature"
        )
    spec = _run_spec(ctx, given)
    _warn(spec)
    try:
        finished = _run(spec, is_quiet=given["quiet"])
    except Interrupted as interrupted:
        click.echo(f"loadgen: {interrupted}", err=True)
        ctx.exit(EXIT_INTERRUPTED)
    code = _exit_code(finished)
    if given["checks"] and not finished.run.interrupted:
        finished, found = _recheck(spec, finished, is_quiet=given["quiet"])
        code = found if found == EXIT_INTERRUPTED else code or found
    _print_summary(spec, finished)
    ctx.exit(code)


def _run(spec: RunSpec, *, is_quiet: bool) -> FinishedRun:
    times = [request.at_s for request in spec.plan.requests if request.at_s is not None]
    with LiveView(
        name=spec.plan.name,
        url=", ".join(spec.target.urls),
        num_requests=len(spec.plan.requests),
        planned_s=max(times, default=0.0),
        lag_limit_s=lag_limit_s(OutcomeRules(slos=spec.plan.slos)),
        is_quiet=is_quiet,
    ) as view:
        finished = run(spec, view)
        if finished.cache.is_warm:
            view.warn(finished.cache.text)
        return finished


def _exit_code(finished: FinishedRun) -> int:
    if finished.run.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_INVALID if finished.run.invalid else 0


# Parsing of arguments.


def _run_spec(ctx: click.Context, given: Mapping[str, Any]) -> RunSpec:
    """Return the run's specification. Raises LoadgenError."""
    plan = _plan(ctx, given)
    target, server = target_of(given)
    slos = override_slos(plan.slos, given["slos"])
    plan = replace(plan, slos=slos)
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in plan.name)[:60]
    return RunSpec(
        plan=plan,
        plan_file=given["plan"],
        target=target,
        out=given["out"] or Path(f"loadgen-{datetime.now():%Y%m%d-%H%M%S}-{name}"),
        processes=processes_of(given["processes"], plan, Priority(given["priority"])),
        warm_ups=given["warmup"],
        priority=Priority(given["priority"]),
        server=server_facts(given, server),
        flags=flags_of({**given, "seed": plan.seed}, target, slos),
    )


def _plan(ctx: click.Context, given: Mapping[str, Any]) -> Plan:
    made = {
        name: given[name]
        for name in ("rate", "seconds", "input_tokens", "output_tokens", "seed")
        if given[name] is not None
    }
    if given["plan"] is not None:
        if made:
            raise click.UsageError(
                f"--{next(iter(made)).replace('_', '-')} is only for a run without PLAN; the plan defines it"
            )
        return read_plan(given["plan"])
    if "rate" not in made:
        raise click.UsageError("PLAN is missing; give a file of `loadgen plan`, or --rate for a first look")
    from loadgen.plan.sources.workloads import DEFAULT_VOCABULARY, simple_plan

    vocabulary = DEFAULT_VOCABULARY
    if given["tokenizer"]:
        from loadgen.plan.vocabulary import vocabulary_of

        vocabulary = vocabulary_of(given["tokenizer"])
    return simple_plan(
        rate_rps=made["rate"],
        seconds=made.get("seconds", 30.0),
        input_tokens=made.get("input_tokens", 128),
        output_tokens=made.get("output_tokens", 32),
        seed=made.get("seed", secrets.randbits(SEED_BITS)),
        vocabulary=vocabulary,
    )


# Output.


def _warn(spec: RunSpec) -> None:
    if warning := rates_warning(spec.plan, spec.processes, spec.priority):
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    if spec.processes > usable_cores():
        click.secho(
            f"warning: {spec.processes} processes share {usable_cores()} cores and will delay each other; give "
            "fewer --processes",
            fg="yellow",
            err=True,
        )
    longest = spec.server.get("max_model_len")
    if longest is not None:
        num_long = len(spec.plan.longer_than(longest))
        if num_long:
            click.secho(
                f"warning: {num_long} of {len(spec.plan.requests)} requests exceed the server's max_model_len of "
                f"{longest} tokens",
                fg="yellow",
                err=True,
            )


def _recheck(spec: RunSpec, finished: FinishedRun, *, is_quiet: bool) -> tuple[FinishedRun, int]:
    """Repeat the requests and return the run with the comparison noted, and the check's exit code.

    The run's result is kept whatever the check finds.
    """
    from loadgen.send.run.recheck import check

    def noted(text: str) -> FinishedRun:
        return replace(finished, notes=(*finished.notes, f"check: {text}"))

    def progress(done: int, of: int) -> None:
        if not is_quiet and sys.stderr.isatty():
            click.echo(f"\rrepeating requests one at a time: {done} of {of}", err=True, nl=False)

    try:
        checked = asyncio.run(check(spec.plan, spec.target, finished.records, progress))
    except KeyboardInterrupt:
        return noted("interrupted while repeating requests"), EXIT_INTERRUPTED
    except LoadgenError as error:
        return noted(f"not done: {error}"), EXIT_DIFFERS
    finally:
        if not is_quiet and sys.stderr.isatty():
            click.echo("", err=True)
    done = replace(noted(str(checked)), run=replace(finished.run, check=checked.to_json()))
    write_run(spec.out, done.run)
    return done, 0 if checked.is_same else EXIT_DIFFERS


def _print_summary(spec: RunSpec, finished: FinishedRun) -> None:
    from loadgen.commands.summary_text import summary_lines

    for text, style in summary_lines(finished, spec.plan, spec.out):
        click.secho(text, fg=style or None, bold=style == "red")
