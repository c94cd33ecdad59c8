"""Implements `baton status --watch`: on a terminal in the alternate screen, else as a log of changes."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from baton.cli.admin.gateway_connection import AdminContext, GatewayAddress, ReconnectingGateway, unreachable
from baton.cli.admin.status_view import render_status
from baton.cli.formatting import console
from baton.core.client_api import ClusterStatus
from baton.core.errors import BatonError, StreamBroken
from baton.core.plain_json import to_plain

FIXED_LINES = 14
"""Lines of a status without rows of workers, blocks and links."""
Show = Callable[[ClusterStatus | None, str], None]
"""Shows the last known status, and the problem if the gateway does not answer now (else an empty text)."""


async def watch_status(gateway: GatewayAddress, context: AdminContext, *, as_json: bool) -> None:
    """Show the status of a cluster again and again, until cancelled. Survives restarts of the gateway."""
    out = console()
    on_screen = not as_json and out.is_terminal and not out.is_dumb_terminal
    live: AbstractContextManager[Any] = (
        Live(console=out, screen=True, auto_refresh=False) if on_screen else nullcontext()
    )
    last: ClusterStatus | None = None
    async with ReconnectingGateway(gateway, context) as client:
        with live as screen:
            show = _json_lines() if as_json else _changes(out) if screen is None else _screen(out, screen)
            while True:
                problem = ""
                try:
                    last = await client.status()
                except StreamBroken as broken:
                    problem = str(unreachable(broken, context.running_clusters()))
                except BatonError as refused:
                    if last is None:
                        raise  # such as a missing key, which does not change by itself
                    problem = str(refused)
                show(last, problem)
                await asyncio.sleep(context.intervals.watch_s)


def _json_lines() -> Show:
    def show(status: ClusterStatus | None, problem: str) -> None:
        click.echo(json.dumps({"error": problem} if problem else to_plain(status)))

    return show


def _changes(out: Console) -> Show:
    """Print a status, without escape codes, whenever it differs from the one before."""
    before: tuple[ClusterStatus | None, str] | None = None

    def show(status: ClusterStatus | None, problem: str) -> None:
        nonlocal before
        if (now := (None if problem else status, problem)) == before:
            return
        if before is not None:
            out.print()
        before = now
        at = f"{datetime.now():%H:%M:%S}"
        out.print(
            f"{at}  {problem}" if problem or status is None else render_status(status, at=at), soft_wrap=bool(problem)
        )

    return show


def _screen(out: Console, screen: Live) -> Show:
    """Redraw the alternate screen. Without an answer, the last status stays below the problem."""

    def show(status: ClusterStatus | None, problem: str) -> None:
        at = f"{datetime.now():%H:%M:%S}"
        parts: list[RenderableType] = [Text(f"{at}  {problem}", style="bold red"), ""] if problem else []
        if status is not None:
            rows = 2 * len(status.workers) + FIXED_LINES + 3 * bool(problem)
            body = render_status(status, max_links=max(3, out.height - rows), at="" if problem else at)
            parts.append(body)
        parts += ["", Text("Ctrl-C ends", style="dim")]
        screen.update(Group(*parts), refresh=True)

    return show
