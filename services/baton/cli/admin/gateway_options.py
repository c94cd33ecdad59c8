"""Command line options by which a user names a gateway."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import click
from click.core import ParameterSource

from baton.cli.admin.gateway_connection import SYSTEM, AdminContext
from baton.cli.admin.locate_gateway import DEFAULT_GATEWAY, GatewayChoice


def address_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds --gateway and --url to a command.

    It passes `choice`, a `GatewayChoice` with an address or a URL or neither, and `context`.

    default: the gateway without these options, for the help.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--gateway",
            "address",
            default="",
            envvar="BATON_GATEWAY",
            metavar="HOST:PORT",
            callback=_parse_address,
            help=f"gRPC address of a gateway. Default: {default}. [BATON_GATEWAY]",
        )
        @click.option("--url", default="", metavar="URL", help="HTTP address of a gateway, instead of --gateway.")
        @click.pass_context
        @wraps(function)
        def with_address(ctx: click.Context, *args: Any, address: str, url: str, **options: Any) -> Any:
            if url and ctx.get_parameter_source("address") is ParameterSource.COMMANDLINE:
                raise click.UsageError("give either --gateway or --url")
            choice = GatewayChoice(address="" if url else address, url=url)
            return function(*args, choice=choice, context=ctx.find_object(AdminContext) or AdminContext(), **options)

        return with_address

    return decorate


def gateway_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with all options of a `GatewayChoice`, passed as `choice`, and with `context`."""

    @click.option(
        "--api-key",
        default="",
        envvar="BATON_API_KEY",
        help="API key of an admin, if the gateway uses API keys. Default: none. [BATON_API_KEY]",
    )
    @click.option(
        "--gateway-ca",
        "ca",
        default="",
        envvar="BATON_GATEWAY_CA",
        metavar=f"FILE|{SYSTEM}",
        help=f"PEM file of the CA of the gateway's certificate, or `{SYSTEM}` for the CAs of this machine. Default: "
        "none, plain text. [BATON_GATEWAY_CA]",
    )
    @click.option(
        "--gateway-name",
        "name",
        default="",
        envvar="BATON_GATEWAY_NAME",
        help="Host name in the gateway's certificate. Default: the host of its address. [BATON_GATEWAY_NAME]",
    )
    @wraps(function)
    def with_gateway(*args: Any, choice: GatewayChoice, api_key: str, ca: str, name: str, **options: Any) -> Any:
        return function(*args, choice=replace(choice, api_key=api_key, ca=ca, name=name), **options)

    default = f"the newest `baton up` of this user on this machine, else {DEFAULT_GATEWAY}"
    return address_options(default)(with_gateway)


def _parse_address(ctx: click.Context, param: click.Parameter, value: str) -> str:
    host, _, port = value.rpartition(":")
    if value and (not host or not port.isdecimal() or "/" in host):
        remedy = "; --url takes its HTTP address" if "/" in host else ""
        raise click.BadParameter(f"expected HOST:PORT of a gateway's gRPC port, got {value!r}{remedy}")
    return value
