"""Implements `baton view`, which opens the live view of a running cluster in the browser."""

import click

from baton.cli.admin.gateway_connection import AdminContext
from baton.core.errors import BatonError


@click.command()
@click.option(
    "--url",
    default="",
    help="Address of the live view. Default: that of the newest `baton up` of this user.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the address instead of opening a browser.")
@click.pass_context
def view(ctx: click.Context, url: str, only_print: bool) -> None:
    """Open the live view of a running cluster in the browser.

    It shows workers, links, requests and decisions as they change. With API keys on, it asks for an admin's
    key.
    """
    context = ctx.find_object(AdminContext) or AdminContext()
    address = url or next((cluster.view for cluster in context.running_clusters() if cluster.view), "")
    if not address:
        raise BatonError(
            "no cluster of `baton up` runs here; start one, or name the admin port of a gateway with --url, such as "
            "http://127.0.0.1:8002/"
        )
    click.echo(address)
    if not only_print and click.launch(address) != 0:
        click.echo("no browser could be started; open the address yourself", err=True)
