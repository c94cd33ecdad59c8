"""Runs the HTTP application on uvicorn, inside a loop and process that are not uvicorn's."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Self

import uvicorn

from baton.core.errors import ConfigError
from baton.gateway.openai_api.protocol import GatewayProtocol, protocol_class
from baton.runtime.logging import get_logger
from baton.runtime.tls import Pair

log = get_logger(__name__)

RENEW_S = 5.0
"""Between two looks at a certificate."""
KEEP_ALIVE_S = 75
"""An idle connection is kept longer than most clients and proxies keep theirs, so that it is they who close it."""


class HttpServer:
    """`async with HttpServer(app, sock, ...)`: serves inside; leaving stops accepting, gives running answers `grace_s`, and closes.
    `app.refused` is told of requests that never reach it."""

    def __init__(self, app: Any, sock: socket.socket, *, receive_deadline_s: float, grace_s: float = 1.0, tls: Pair | None = None) -> None:
        """`tls`: without it, plain text. Raises ConfigError when its files are no certificate and key."""
        if tls is not None:
            tls.check()
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
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        self._tls = tls
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

    async def follow_certificate(self) -> None:
        """New connections get a certificate that was renewed, for ever. One that cannot be read changes nothing."""
        assert self._tls is not None
        last = self._tls.version()
        while True:
            await asyncio.sleep(RENEW_S)
            if (now := self._tls.version()) == last or now is None or self._server.config.ssl is None:
                continue
            try:
                self._tls.check()
                self._server.config.ssl.load_cert_chain(*self._tls.files)
            except (ConfigError, OSError) as error:
                log.warning("certificate_not_renewed", problem=str(error), hint="the one from before stays")
            last = now

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
