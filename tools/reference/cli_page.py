"""The CLI page: every command of `baton` and `loadgen` with its help text."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import click

from baton.cli.main import cli as baton
from baton.cli.up_help import ALL, UpCommand
from loadgen.cli import cli as loadgen
from tools.reference.markdown import block, page, paragraph

COLUMNS = 100


def cli_page() -> str:
    """One section per command, with what `--help` (or `--help-all`) prints in a terminal of 100 columns."""
    parts = [
        paragraph(
            "Each section shows what `--help` prints, or `--help-all` for `baton up`. Settings of the services are "
            "also environment variables and YAML keys: see [Configuration](config.md)."
        )
    ]
    with patch.dict(os.environ, {"COLUMNS": str(COLUMNS)}):
        for name, command in (("baton", baton), ("loadgen", loadgen)):
            for path, found in _commands(name, command):
                context = click.Context(found, info_name=path, terminal_width=COLUMNS, max_content_width=COLUMNS)
                if isinstance(found, UpCommand):
                    context.meta[ALL] = True  # as --help-all
                parts += [f"## {path}", block(found.get_help(context))]
    return page("Command line", *parts)


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from _commands(f"{path} {name}", child)
