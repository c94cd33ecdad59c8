"""The `baton` command."""

import sys
from collections.abc import Sequence

import click

import baton
from baton.cli import admin_commands, config_command, doctor_command, key_command, model_command, service_commands
from baton.cli.expected_errors import on_purpose
from baton.core.errors import BatonError
from baton.runtime.process.process import report_to_nobody

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(context_settings=CONTEXT)
@click.version_option(baton.__version__, prog_name="baton", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve large language models with prefill and decode on different workers.

    `baton up` starts a whole cluster on this machine. Completion for your shell: eval
    "$(_BATON_COMPLETE=bash_source baton)"; for zsh and fish, zsh_source and fish_source.
    """


for command in (
    *service_commands.COMMANDS,
    *admin_commands.COMMANDS,
    config_command.config,
    doctor_command.doctor,
    key_command.key,
    model_command.model,
):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; an error that Baton raised on purpose is one line on standard error and exit code 1,
    not a traceback."""
    report_to_nobody()
    try:
        cli.main(args=list(args) if args is not None else None, prog_name="baton")
    except (BatonError, BaseExceptionGroup) as error:
        told = on_purpose(error)
        if told is None:
            raise
        click.echo(f"baton: {told}", err=True)
        sys.exit(1)
