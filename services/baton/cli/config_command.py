"""Implements `baton config`, which shows effective settings and their sources."""

import json
from typing import Any

import click

from baton.cli.setting_options import CONFIG_FILE, SettingsCommand, load_options, settings_options
from baton.runtime.config.config_base import Loaded, json_schema, settings_of
from baton.runtime.config.settings import SERVICES, ClusterConfig


@click.command(cls=SettingsCommand)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the config file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@settings_options(ClusterConfig)
def config(schema: bool, as_json: bool, **options: Any) -> None:
    """Show each setting of `baton up` with its source."""
    if schema:
        click.echo(json.dumps(json_schema(*SERVICES.values()), indent=2))
        return
    loaded = load_options(ClusterConfig, options)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(_as_json(loaded), indent=2))
        return
    rows = loaded.rows()
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, source in rows:
        click.echo(f"{name:<{name_width}}  {value:<{value_width}}  {source}")
    if options[CONFIG_FILE] is None:
        click.echo(
            f"\nno config file was read; set one with --config FILE "
            f"({click.style('baton config --schema', bold=True)} shows its format)",
            err=True,
        )


def _as_json(loaded: Loaded[ClusterConfig]) -> dict[str, dict[str, Any]]:
    """Return {name: {value, source}}, with secrets masked as in the table."""
    config = loaded.config
    return {
        item.name: {
            "value": item.shown(getattr(config, item.name)) or None
            if item.secret
            else item.plain(getattr(config, item.name)),
            "source": loaded.sources[item.name],
        }
        for item in settings_of(type(config))
    }
