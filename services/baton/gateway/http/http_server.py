"""Runs the HTTP application with uvicorn inside an existing event loop."""

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Self

import uvicorn

from baton.core.errors import Failure
from baton.gateway.http.http_protocol import CHECKS_UNTIL_UNREAD, GatewayProtocol, protocol_class
from baton.gateway.http.tls_acceptor import TlsAcceptor
from baton.runtime.network.tls_files import CERTIFICATE_RELOAD_FAILED, CertificatePair
from baton.runtime.process.shared_account import SharedAccount
from baton.runtime.process.watched_files import WatchedFiles

CERTIFICATE_CHECK_S = 5.0
"""Interval at which the certificate files are checked for changes."""
KEEP_ALIVE_S = 75
"""Time after which an idle connection is closed. It is longer than the timeout of most clients and proxies,
so that these close the connection first and never send a request into a closing one."""


class HttpServer:
    """HTTP server. Use as `async with`: leaving stops accepting, waits `grace_s` for running responses, and
    closes.

    Calls `app.count_rejected` for requests that the connection rejects before the application sees them.
    """

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        *,
        receive_deadline_s: float,
        unread_s: float,
        max_connections: int,
        heads: SharedAccount,
        grace_s: float = 1.0,
        tls: CertificatePair | None = None,
    ) -> None:
        """Create a server on a listening socket. Without `tls` it serves plain text.

        receive_deadline_s: time in which a request must be received.
        unread_s: time after which a client that reads nothing of its response loses the connection.
        max_connections, heads: see `protocol_class`.

        Raises ConfigError if the TLS files are not a valid certificate and key.
        """
        certificate = (
            WatchedFiles(tls.context, *tls.files, event=CERTIFICATE_RELOAD_FAILED) if tls is not None else None
        )
        config = uvicorn.Config(
            app,
            http=protocol_class(  # type: ignore[arg-type]
                receive_deadline_s, app.count_rejected, max_connections=max_connections, heads=heads
            ),
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
            ssl_context_factory=None
            if certificate is None
            else lambda *_: _context_with_newest_certificate(certificate),
        )
        self._certificate = certificate
        self._server = _UvicornServer(config, max_connections, app.count_rejected)
        self._sock = sock
        self._unread_s = unread_s
        self._task: asyncio.Task[None] | None = None
        self._unread_task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        port: int = self._sock.getsockname()[1]
        return port

    @property
    def connections(self) -> tuple[GatewayProtocol, ...]:
        """The open connections."""
        return tuple(c for c in self._server.server_state.connections if isinstance(c, GatewayProtocol))

    @property
    def num_handshakes(self) -> int:
        """Number of connections whose TLS handshake is not complete."""
        return sum(acceptor.num_handshakes for acceptor in self._server.servers if isinstance(acceptor, TlsAcceptor))

    async def reload_certificate(self, interval_s: float = CERTIFICATE_CHECK_S) -> None:
        """Use renewed certificate files for new connections, until cancelled. Unreadable files change
        nothing."""
        assert self._certificate is not None
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self._certificate.reload_if_changed)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http")
        listening = asyncio.create_task(self._server.listening.wait())
        try:
            await asyncio.wait((self._task, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
        if self._task.done():
            await self._task  # raises the error that stopped it
        self._unread_task = asyncio.create_task(self._check_unread(), name="http-unread")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        if self._unread_task is not None:
            self._unread_task.cancel()
            await asyncio.wait((self._unread_task,))

    async def _check_unread(self) -> None:
        while True:
            await asyncio.sleep(self._unread_s / CHECKS_UNTIL_UNREAD)
            for connection in self.connections:
                connection.check_unread()


def _context_with_newest_certificate(followed: WatchedFiles[ssl.SSLContext]) -> ssl.SSLContext:
    """Return an SSL context for listening that gives each new connection the newest certificate.

    Loading new files into the listening context itself is not safe. If the files were replaced at that
    moment, the context would have neither the old nor the new pair.
    """

    def hand_over(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        connection.context = followed.value

    listening = followed.value
    listening.sni_callback = hand_over  # called for each connection, even if it names no server
    return listening


class _UvicornServer(uvicorn.Server):
    """uvicorn's server, with TLS connections counted from their handshake on.

    It has no signal handlers, because the gateway process handles signals itself.
    """

    def __init__(self, config: uvicorn.Config, max_connections: int, on_refused: Callable[[Failure], None]) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._max_connections = max_connections
        self._on_refused = on_refused

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is None:
            await super().startup(sockets)
        else:
            await super().startup([])  # everything except listening
            for sock in sockets or ():
                self._accept_tls(sock, self.config.ssl)
        self.listening.set()

    def _accept_tls(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        protocol: Any = self.config.http_protocol_class
        make_protocol = functools.partial(
            protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        acceptor = TlsAcceptor(
            sock,
            context,
            make_protocol,
            max_connections=self._max_connections,
            num_open=lambda: len(self.server_state.connections),
            on_refused=self._on_refused,
        )
        acceptor.start()
        self.servers.append(acceptor)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
