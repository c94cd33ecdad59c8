"""Implements `baton view`, which opens the live view of a running cluster in the browser."""

import webbrowser

import click

from baton.cli.admin.gateway_connection import AdminContext
from baton.cli.admin.gateway_options import address_options
from baton.cli.admin.locate_gateway import GatewayChoice, describe_clusters, named_cluster, newest_note
from baton.core.errors import BatonError


@click.command()
@address_options("the newest `baton up` of this user on this machine")
@click.option("--print", "only_print", is_flag=True, help="Print the address instead of opening a browser.")
def view(only_print: bool, choice: GatewayChoice, context: AdminContext) -> None:
    """Open the live view of a running cluster in the browser.

    It shows workers, links, requests and decisions as they change. With API keys on, it asks for an admin's
    key. The gateway of a cluster that `baton up` did not start serves the view at its --admin-port.
    """
    running = [cluster for cluster in context.running_clusters() if cluster.view]
    if not running:
        raise BatonError(
            "no `baton up` of this user runs here; start one. Any gateway serves the live view at its --admin-port"
        )
    cluster = running[0]
    if named := choice.url or choice.address:
        found = named_cluster(choice, running)
        if found is None:
            raise BatonError(
                f"no `baton up` of this user serves {named} here; open the --admin-port of that gateway in a "
                f"browser, or choose one of\n{describe_clusters(running)}"
            )
        cluster = found
    elif len(running) > 1:
        click.echo(newest_note(running), err=True)
    click.echo(cluster.view)
    if not only_print and not webbrowser.open(cluster.view):
        click.echo("no browser could be started; open the address yourself", err=True)
