"""`baton config`: effective values and where each comes from."""

import json
from typing import Any

import click

from baton.cli.options import CONFIG_FILE, load_options, settings_options
from baton.runtime.config import dump, json_schema
from baton.runtime.settings import SERVICES, ClusterConfig


@click.command()
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the config file instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@settings_options(ClusterConfig)
def config(schema: bool, as_json: bool, **options: Any) -> None:
    """Show every setting of `baton up`, its value and where it comes from."""
    if schema:
        click.echo(json.dumps(json_schema(*SERVICES.values()), indent=2))
        return
    loaded = load_options(ClusterConfig, options)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(dump(loaded.config), indent=2))
        return
    rows = loaded.rows()
    width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for name, value, source in rows:
        click.echo(f"{name:<{width}}  {value:<{value_width}}  {source}")
    if options[CONFIG_FILE] is None:
        click.echo(f"\nno config file; --config FILE reads one ({click.style('baton config --schema', bold=True)} describes it)")
