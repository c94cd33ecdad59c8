"""Serves the admin port of a process: `/metrics`, `/health` and `/ready`."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.runtime.network.addresses import listen
from baton.runtime.observability.health import Health
from baton.runtime.observability.metrics import CONTENT_TYPE, expose


def probe_routes(
    health: Health, registry: CollectorRegistry, refresh: Callable[[], None] = lambda: None
) -> list[Route]:
    """Create the routes for health, readiness and metrics.

    /health: 200, or 503 if the process has failed.
    /ready: 200 if it can serve, else 503 with the reasons.
    /metrics: Prometheus text format, after a call of `refresh`, which updates gauges that are read on demand.
    """

    async def alive(_: Request) -> Response:
        return JSONResponse(
            {"status": "ok" if health.is_alive else "failed"}, status_code=200 if health.is_alive else 503
        )

    async def ready(_: Request) -> Response:
        reasons = list(health.reasons)
        return JSONResponse(
            {"status": "waiting" if reasons else "ready", "reasons": reasons}, status_code=503 if reasons else 200
        )

    async def metrics(_: Request) -> Response:
        refresh()
        return Response(expose(registry), media_type=CONTENT_TYPE)

    return [Route("/health", alive), Route("/ready", ready), Route("/metrics", metrics)]


class AdminServer:
    """HTTP server for `probe_routes` on the service's event loop."""

    def __init__(self, health: Health, registry: CollectorRegistry, refresh: Callable[[], None] = lambda: None) -> None:
        app = Starlette(routes=probe_routes(health, registry, refresh))
        # h11 limits the size of a request's head; httptools does not
        config = uvicorn.Config(
            app, http="h11", ws="none", log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, host: str, port: int) -> int:
        """Start serving and return the port (0 selects a free one). Raises ConfigError if it is in use."""
        self._socket = listen(host, port, flag="--admin-port")
        self._task = asyncio.create_task(self._server._serve([self._socket]), name="admin-http")
        bound: int = self._socket.getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop serving. Does nothing if the server was never started."""
        self._server.should_exit = True
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task
        if self._socket is not None:
            self._socket.close()
