"""Accepts TLS connections so that unfinished handshakes count as connections.

asyncio creates the protocol of a connection only after its handshake. A server that counts protocols
therefore sees none of the clients that connect and send nothing.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable

from baton.core.errors import Code, Failure, Reason
from baton.runtime.logging import get_logger

log = get_logger(__name__)

HANDSHAKE_S = 10.0
"""Time in which a client must complete its TLS handshake."""
ACCEPT_RETRY_S = 1.0
"""Pause after a failed accept, for example because no file descriptor is free. asyncio's servers wait as
long."""
BACKLOG = 2048


class TlsAcceptor:
    """Accepts TLS connections on one listening socket. Has the part of `asyncio.Server` that uvicorn uses."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        max_connections: int,
        num_open: Callable[[], int],
        on_refused: Callable[[Failure], None],
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Create an acceptor; `start` makes it listen.

        max_connections: limit of open connections and unfinished handshakes together. A further connection is
            closed before its handshake.
        num_open: returns the number of connections whose handshake is complete.
        on_refused: called for each connection over the limit.
        """
        self._sock = sock
        self._context = context
        self._make_protocol = make_protocol
        self._max_connections = max_connections
        self._num_open = num_open
        self._on_refused = on_refused
        self._handshake_s = handshake_s
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    @property
    def num_handshakes(self) -> int:
        """Number of connections whose handshake is not complete."""
        return len(self._handshakes)

    def start(self) -> None:
        """Listen, and accept connections until `close`."""
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept(), name="tls-accept")

    def close(self) -> None:
        """Stop accepting, and end the unfinished handshakes. Open connections go on."""
        for task in (self._accepting, *self._handshakes):
            if task is not None:
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait until `close` has taken effect."""
        tasks = [task for task in (self._accepting, *self._handshakes) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                log.warning("accept_failed", reason=str(error))
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if self._num_open() + len(self._handshakes) >= self._max_connections:
                connection.close()
                self._on_refused(
                    Failure(
                        code=Code.RESOURCE_EXHAUSTED,
                        reason=Reason.QUEUE_FULL,
                        message=f"{self._max_connections} connections are open or in their TLS handshake, which is "
                        "the limit; close idle connections, or raise --max-connections",
                    )
                )
                continue
            task = asyncio.create_task(self._handshake(connection), name="tls-handshake")
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except OSError as error:  # of the client, of TLS, and the timeout
            log.debug("tls_handshake_failed", reason=str(error))
        except BaseException:
            connection.close()
            raise
