"""The `baton` command and its entry point."""

import sys
from collections.abc import Sequence

import click

import baton
from baton.cli import config_command, doctor_command, key_command, model_command, service_commands, view_command
from baton.cli.admin import admin_commands
from baton.cli.service_commands import expected_error
from baton.core.errors import BatonError
from baton.runtime.process.process import disable_usage_reports

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(context_settings=CONTEXT)
@click.version_option(baton.__version__, prog_name="baton", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve large language models with prefill and decode on different workers.

    `baton up` starts a complete cluster on this machine. To enable shell completion, run: eval
    "$(_BATON_COMPLETE=bash_source baton)" (zsh_source for zsh, fish_source for fish).
    """


for command in (
    *service_commands.COMMANDS,
    *admin_commands.COMMANDS,
    config_command.config,
    doctor_command.doctor,
    key_command.key,
    model_command.model,
    view_command.view,
):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command. A BatonError prints one line to standard error, and the exit code is 1."""
    disable_usage_reports()
    try:
        cli.main(args=list(args) if args is not None else None, prog_name="baton")
    except (BatonError, BaseExceptionGroup) as error:
        expected = expected_error(error)
        if expected is None:
            raise
        click.echo(f"baton: {expected}", err=True)
        sys.exit(1)
