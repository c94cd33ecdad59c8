"""`baton status --watch`: the alternate screen of a terminal, and a readable log elsewhere."""

import io
import re
from collections.abc import Awaitable, Callable

import pytest
from rich.console import Console

from baton.cli.admin import status_watch
from baton.cli.admin.gateway_connection import GatewayAddress
from baton.cli.admin.status_watch import watch_status
from baton.core.client_api import ClusterStatus
from baton.core.errors import BatonError, StreamBroken
from tests.builders import cluster_status, worker_report
from tests.unit.cli.test_admin_commands import FakeGateway, admin_context

IDLE, BUSY = cluster_status(worker_report("w0")), cluster_status(worker_report("w0", running_seqs=77))
GONE = StreamBroken("h:1: gone")


class Ended(Exception):
    """Ends a watch."""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[str]]:
    """Watches these answers, and returns what was written to a console."""

    async def watch(*answers: ClusterStatus | BaseException, is_terminal: bool, width: int = 80) -> str:
        out = io.StringIO()
        shown = Console(file=out, force_terminal=is_terminal, width=width, height=40, highlight=False)
        monkeypatch.setattr(status_watch, "console", lambda: shown)
        context = admin_context(FakeGateway(*answers, Ended()))
        with pytest.raises(Ended):
            await watch_status(GatewayAddress("h:1"), context, as_json=False)
        return out.getvalue()

    return watch


async def test_terminal_gets_the_alternate_screen_and_it_is_left_at_the_end(
    watched: Callable[..., Awaitable[str]],
) -> None:
    written = await watched(IDLE, BUSY, is_terminal=True)
    assert written.count("\x1b[?1049h") == written.count("\x1b[?1049l") == 1
    frames = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame) for frame in written.split("\x1b[H")]
    assert all(len(line) <= 80 for frame in frames for line in frame.splitlines())
    assert "77" in frames[-1]


async def test_last_status_stays_on_the_screen_while_the_gateway_is_away(
    watched: Callable[..., Awaitable[str]],
) -> None:
    written = await watched(BUSY, GONE, is_terminal=True)
    last = written.split("\x1b[H")[-1]
    assert "no gateway answers" in last
    assert "77" in last


async def test_log_has_each_change_once_and_no_escape_codes(watched: Callable[..., Awaitable[str]]) -> None:
    written = await watched(IDLE, IDLE, GONE, GONE, BUSY, is_terminal=False, width=200)
    assert "\x1b" not in written
    assert written.count("demo  baton") == 2
    assert written.count("no gateway answers at h:1") == 1


async def test_refusal_at_the_start_is_an_error_and_later_a_message(watched: Callable[..., Awaitable[str]]) -> None:
    with pytest.raises(BatonError, match="no key"):
        await watch_status(GatewayAddress("h:1"), admin_context(FakeGateway(BatonError("no key"))), as_json=True)
    assert "no key" in await watched(IDLE, BatonError("no key"), is_terminal=False)
