"""Serves the page of the live view with snapshots that a test chooses, so that no cluster is needed."""

import asyncio
import copy
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from baton.gateway.live.live_feed import event
from baton.gateway.live.static_files import CONTENT_SECURITY_POLICY, static_files
from tests.unit.gateway.live_rig import live_rig

NOW = 1_800_000_000.0


@dataclass(slots=True)
class CannedView:
    """A stub of the admin port.

    base: a snapshot of the chosen workers; `send` changes a copy of it.
    refusal: status and message with which `/live/events` answers; None: it streams.
    details: answers `/live/requests/ID` with a status and a body.
    """

    base: dict[str, Any]
    url: str = ""
    refusal: tuple[int, str] | None = None
    details: Callable[[str], tuple[int, Any]] = lambda _: (404, {"error": {"message": "unknown"}})
    num_opened: int = 0
    current: bytes = b""
    _streams: list[asyncio.Queue[bytes | None]] = field(default_factory=list)

    def send(self, **changes: Any) -> None:
        """Send a snapshot to all viewers, and to new ones at once."""
        self.current = event("snapshot", self.base | changes)
        for stream in self._streams:
            stream.put_nowait(self.current)

    def end(self) -> None:
        """End all streams."""
        for stream in self._streams:
            stream.put_nowait(None)

    async def events(self, _: Request) -> Response:
        self.num_opened += 1
        if self.refusal is not None:
            status, message = self.refusal
            return JSONResponse({"error": {"message": message}}, status_code=status)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        stream: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams.append(stream)
        yield event("history", []) + self.current
        while (piece := await stream.get()) is not None:
            yield piece

    async def request(self, request: Request) -> Response:
        status, body = self.details(request.path_params["id"])
        return JSONResponse(body, status_code=status)


def point(t: float, ok: float = 0.0) -> dict[str, Any]:
    """Return one point of the charts."""
    names = ("failed", "refused", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "attainment", "hit", "ceiling")
    return {"t": t, "ok": ok, "tokens": 0.0} | dict.fromkeys(names, 0.0)


async def canned_snapshot(*workers: tuple[str, str]) -> dict[str, Any]:
    """Return a real snapshot of stub workers with these ids and roles, at the time `NOW`."""
    async with live_rig(*workers) as rig:
        found = copy.deepcopy(await rig.snapshot())
    return {**found, "now": NOW, "points": [point(NOW)]}


@asynccontextmanager
async def canned_view(*workers: tuple[str, str]) -> AsyncIterator[CannedView]:
    view = CannedView(await canned_snapshot(*workers))
    view.send()
    files = static_files()

    async def file(request: Request) -> Response:
        found = files[request.path_params.get("name", "index.html")]
        headers = {"content-type": found.content_type.decode(), "content-security-policy": CONTENT_SECURITY_POLICY}
        return Response(found.body, headers=headers)

    routes = [
        Route("/", file),
        Route("/static/{name}", file),
        Route("/live/events", view.events),
        Route("/live/requests/{id}", view.request),
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(Starlette(routes=routes), lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        view.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        yield view
        view.end()
        server.should_exit = True
        await serving
