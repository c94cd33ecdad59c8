"""The `loadgen` command. What a subcommand needs is imported when it is called."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

import click

from loadgen.loadgen_errors import LoadgenError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
COMMANDS = {
    "plan": "Freeze a workload into a file.",
    "run": "Send a plan to a server, and record what becomes of it.",
    "capacity": "Find the highest rate at which the promises are kept.",
    "report": "Show what runs have measured.",
    "compare": "Tell whether one run is better than another.",
    "selftest": "Measure loadgen's own error on this machine.",
}
"""Each is `command` in the module of its name in `loadgen.commands`; here, with what the overview says of
it."""
EXIT_ERROR = 2


class _Lazy(click.Group):
    """Finds a subcommand's module when it is needed."""

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
    """Load for OpenAI-compatible servers that stays open-loop, and goodput reports that can be trusted.

    A first look at a server, http://127.0.0.1:8000 unless --url says another: loadgen run --rate 2 --seconds
    30
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run one command. An error that was raised on purpose is one line on standard error and exit code 2, as
    a wrong argument is."""
    try:
        cli.main(args=list(args) if args is not None else None, prog_name="loadgen")
    except LoadgenError as error:
        click.echo(f"loadgen: {error}", err=True)
        sys.exit(EXIT_ERROR)
