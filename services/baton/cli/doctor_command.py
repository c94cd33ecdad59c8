"""Implements `baton doctor`, which checks this machine and advises how to fix problems."""

import json
import sys

import click


@click.command()
@click.argument("part", metavar="[links]", type=click.Choice(["links"]), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")
@click.option(
    "--min-link-gbps",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Fail if KV moves more slowly between two processes, in gigabits per second; see `baton worker`.",
)
def doctor(part: str | None, as_json: bool, min_link_gbps: float) -> None:
    """Check whether this machine can run Baton.

    Each problem comes with advice. The checks of KV transfers start processes and take some seconds; `baton
    doctor links` runs only these, and says what `--transfer auto` would use. The exit code is 1 if `baton up`
    cannot run here.
    """
    from baton.cli.formatting import console
    from baton.core.plain_json import to_plain
    from baton.fleet.doctor.doctor_check import CheckStatus
    from baton.fleet.doctor.findings import checks_for, findings, is_missing_something

    styles = {CheckStatus.OK: "green", CheckStatus.WARN: "yellow", CheckStatus.FAIL: "bold red"}
    found = []
    out = console()
    for finding in findings(checks_for(min_link_gbps, links_only=part is not None)):
        found.append(finding)
        if not as_json:
            style = styles[finding.verdict]
            out.print(f"[{style}]{finding.verdict.value:<5}[/{style}] [bold]{finding.name:<20}[/bold]", end="")
            out.print(finding.found, markup=False)
            if finding.advice:
                out.print(f"{'':<26}→ {finding.advice}", markup=False, style=style)
    if as_json:
        click.echo(json.dumps([to_plain(finding) for finding in found], indent=2))
    sys.exit(1 if is_missing_something(found) else 0)
