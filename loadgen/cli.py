"""The `loadgen` command line. Each subcommand's module is imported only when it is called."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

import click

from loadgen.loadgen_errors import LoadgenError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
COMMANDS = {
    "plan": "Generate a workload and write it to a file.",
    "run": "Send a plan to a server and record every response.",
    "capacity": "Find the highest request rate at which the SLO is met.",
    "report": "Write HTML, JSON, CSV and Markdown reports of runs.",
    "compare": "Compare two runs and fail on a regression.",
    "selftest": "Measure loadgen's own timing error on this machine.",
}
"""Help texts of the overview, by subcommand. `loadgen.commands.NAME_command.command` implements each."""
EXIT_ERROR = 2


class _Lazy(click.Group):
    """Imports a subcommand's module when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if importlib.util.find_spec(f"loadgen.commands.{name}_command") is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"loadgen.commands.{cmd_name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from loadgen.machine import loadgen_version

        click.echo(f"loadgen {loadgen_version()}")
        ctx.exit()


@click.group(cls=_Lazy, context_settings=CONTEXT)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit."
)
def cli() -> None:
    """Open-loop load generator for OpenAI-compatible servers, with SLO attainment and goodput reports.

    `loadgen run --rate 2` tests the newest `baton up` of this user on this machine, else
    http://127.0.0.1:8000; --url names another server.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run one command.

    A LoadgenError is printed as one line on standard error and exits with code 2, like a wrong argument.
    """
    try:
        cli.main(args=list(args) if args is not None else None, prog_name="loadgen")
    except LoadgenError as error:
        click.echo(f"loadgen: {error}", err=True)
        sys.exit(EXIT_ERROR)
