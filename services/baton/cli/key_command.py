"""`baton key`: API keys of a gateway's clients."""

from pathlib import Path
from typing import Any

import click

from baton.core.errors import BatonError


@click.group()
def key() -> None:
    """API keys of a gateway's clients, in a file for `--api-keys`."""


@key.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--name", required=True, help="Whose key it is; stands in refusals.")
@click.option("--tenant", help="Shares cached prefixes with the tenant's other keys, and turns. Default: the name.")
@click.option(
    "--admin", is_flag=True, help="It may see /metrics and /debug, and run `baton status`, `explain` and `drain`."
)
@click.option("--max-open-requests", type=click.IntRange(1), help="Requests at a time.")
@click.option("--requests-per-minute", type=click.IntRange(1), help="With bursts of a tenth of it.")
@click.option("--min-priority", type=int, help="Least number that it may ask for; lower goes first. Default: 0.")
def new(
    file: Path,
    name: str,
    tenant: str | None,
    admin: bool,
    max_open_requests: int | None,
    requests_per_minute: int | None,
    min_priority: int | None,
) -> None:
    """Add a key to FILE, which is made where there is none, and print the key: only its hash is kept.

    Gateways that run see it in a few seconds.
    """
    from baton.gateway.auth.api_keys import digest_of, new_file, new_key, parse_keys
    from baton.runtime.config.config_base import read_file, write_private

    content: dict[str, Any] = read_file(file) if file.exists() else new_file()
    if file.exists():
        parse_keys(content)
    made = new_key()
    entry: dict[str, Any] = {"name": name, "tenant": tenant or name, "sha256": digest_of(made).hex()}
    more = {"admin": admin or None, "max_open_requests": max_open_requests, "requests_per_minute": requests_per_minute}
    more["min_priority"] = min_priority
    content["keys"] = [*content["keys"], entry | {field: value for field, value in more.items() if value is not None}]
    parse_keys(content)
    write_private(file, content)
    click.echo(made)


@key.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("name")
def remove(file: Path, name: str) -> None:
    """Take the key of NAME out of FILE. What runs with it ends as it would have."""
    from baton.gateway.auth.api_keys import parse_keys
    from baton.runtime.config.config_base import read_file, write_private

    content = read_file(file)
    parse_keys(content)
    left = [entry for entry in content["keys"] if entry["name"] != name]
    if len(left) == len(content["keys"]):
        raise BatonError(f"{file} has no key called {name!r}; there are: {', '.join(entry['name'] for entry in left)}")
    if not left:
        raise BatonError(f"{name!r} is the last key of {file}; for a gateway that wants no keys, leave --api-keys out")
    content["keys"] = left
    write_private(file, content)
