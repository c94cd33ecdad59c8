"""Runs the HTTP application on uvicorn, inside a loop and process that are not uvicorn's."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Self

import uvicorn

from baton.gateway.openai_api.protocol import GatewayProtocol, protocol_class

KEEP_ALIVE_S = 75
"""An idle connection is kept longer than most clients and proxies keep theirs, so that it is they who close it."""


class HttpServer:
    """`async with HttpServer(app, sock, ...)`: serves inside; leaving stops accepting, gives running answers `grace_s`, and closes.
    `app.refused` is told of requests that never reach it."""

    def __init__(self, app: Any, sock: socket.socket, *, receive_deadline_s: float, grace_s: float = 1.0) -> None:
        config = uvicorn.Config(
            app,
            http=protocol_class(receive_deadline_s, app.refused),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(grace_s)),
            backlog=2048,
        )
        self._server = _Server(config)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        port: int = self._sock.getsockname()[1]
        return port

    @property
    def connections(self) -> tuple[GatewayProtocol, ...]:
        """Those that are open."""
        return tuple(c for c in self._server.server_state.connections if isinstance(c, GatewayProtocol))

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http")
        listening = asyncio.create_task(self._server.listening.wait())
        try:
            await asyncio.wait((self._task, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
        if self._task.done():
            await self._task  # raises why
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    """Signals are not its business: who runs the process has them."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
