"""Implements `baton key`, which manages a file of API keys."""

from pathlib import Path
from typing import Any

import click

from baton.core.errors import BatonError


@click.group()
def key() -> None:
    """Manage API keys in a file for `baton gateway --api-keys`."""


@key.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--name", required=True, help="Owner of the key, named in error messages.")
@click.option(
    "--tenant", help="Tenant of the key; keys of a tenant share cached prefixes and one fair share. Default: the name."
)
@click.option("--admin", is_flag=True, help="Allow /metrics and /debug, and `baton status`, `explain` and `drain`.")
@click.option("--max-open-requests", type=click.IntRange(1), help="Maximum number of open requests. Default: no limit.")
@click.option(
    "--requests-per-minute",
    type=click.IntRange(1),
    help="Rate limit, with bursts of up to a tenth of it. Default: no limit.",
)
@click.option(
    "--min-priority", type=int, help="Lowest priority number that requests may use; lower runs first. Default: 0."
)
def new(
    file: Path,
    name: str,
    tenant: str | None,
    admin: bool,
    max_open_requests: int | None,
    requests_per_minute: int | None,
    min_priority: int | None,
) -> None:
    """Add a key to FILE and print the key.

    FILE is created if it does not exist. It stores only a hash of the key. Running gateways read the change
    within a few seconds.
    """
    from baton.gateway.auth.api_keys import key_digest, new_key, new_key_file, parse_keys
    from baton.runtime.config.config_base import read_file, write_private

    content: dict[str, Any] = read_file(file) if file.exists() else new_key_file()
    if file.exists():
        parse_keys(content)
    api_key = new_key()
    entry: dict[str, Any] = {"name": name, "tenant": tenant or name, "sha256": key_digest(api_key).hex()}
    optional = {
        "admin": admin or None,
        "max_open_requests": max_open_requests,
        "requests_per_minute": requests_per_minute,
    }
    optional["min_priority"] = min_priority
    content["keys"] = [
        *content["keys"],
        entry | {field: value for field, value in optional.items() if value is not None},
    ]
    parse_keys(content)
    write_private(file, content)
    click.echo(api_key)


@key.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("name")
def remove(file: Path, name: str) -> None:
    """Remove the key called NAME from FILE. Requests that already run are not cancelled."""
    from baton.gateway.auth.api_keys import parse_keys
    from baton.runtime.config.config_base import read_file, write_private

    content = read_file(file)
    parse_keys(content)
    remaining = [entry for entry in content["keys"] if entry["name"] != name]
    if len(remaining) == len(content["keys"]):
        raise BatonError(f"{file} has no key called {name!r}; it has {', '.join(entry['name'] for entry in remaining)}")
    if not remaining:
        raise BatonError(
            f"{name!r} is the last key of {file}; to disable authentication, start the gateway without --api-keys"
        )
    content["keys"] = remaining
    write_private(file, content)
