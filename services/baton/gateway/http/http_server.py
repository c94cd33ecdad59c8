"""Runs the HTTP application on uvicorn, inside a loop and process that are not uvicorn's."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Self

import uvicorn

from baton.gateway.http.http_protocol import GatewayProtocol, protocol_class
from baton.runtime.network.tls_files import CERTIFICATE_RELOAD_FAILED, CertificatePair
from baton.runtime.process.watched_files import WatchedFiles

RENEW_S = 5.0
"""Between two looks at a certificate."""
KEEP_ALIVE_S = 75
"""An idle connection is kept longer than most clients and proxies keep theirs, so that it is they who close
it."""


class HttpServer:
    """`async with HttpServer(app, sock, ...)`: serves inside; leaving stops accepting, gives running answers
    `grace_s`, and closes. `app.refused` is told of requests that never reach it."""

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        *,
        receive_deadline_s: float,
        grace_s: float = 1.0,
        tls: CertificatePair | None = None,
    ) -> None:
        """`tls`: without it, plain text. Raises ConfigError when its files are no certificate and key."""
        certificate = (
            WatchedFiles(tls.context, *tls.files, event=CERTIFICATE_RELOAD_FAILED) if tls is not None else None
        )
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
            ssl_context_factory=None if certificate is None else lambda *_: _always_newest(certificate),
        )
        self._certificate = certificate
        self._server = _UvicornServer(config)
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
        """New connections get a certificate that was renewed, for ever. One that cannot be read changes
        nothing."""
        assert self._certificate is not None
        while True:
            await asyncio.sleep(RENEW_S)
            await asyncio.to_thread(self._certificate.reload_if_changed)

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


def _always_newest(followed: WatchedFiles[ssl.SSLContext]) -> ssl.SSLContext:
    """A context to listen with, which hands each connection over to the newest one there is. Files loaded
    into the context itself would leave it, if they were replaced just then, with neither the old pair nor the
    new one."""

    def hand_over(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        connection.context = followed.value

    listening = followed.value
    listening.sni_callback = hand_over  # called for each connection, whether it names a server or not
    return listening


class _UvicornServer(uvicorn.Server):
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
