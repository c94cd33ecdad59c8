"""Ends connections of clients that a library has accepted and gives no access to."""

import asyncio
import errno
import os
import socket
import stat
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from baton.runtime.logging import get_logger
from baton.runtime.network.addresses import host_of

log = get_logger(__name__)

RETRY_S = 1.0
"""Time until it is tried again if the process had no free descriptor."""
_DESCRIPTORS = "/proc/self/fd"

Endpoint = tuple[bytes, int]
"""Packed IP address and port."""


class ClientConnections:
    """Ends accepted connections of a server in this process, on its event loop."""

    def __init__(self) -> None:
        self._port = 0
        self._clients: set[Endpoint] = set()
        self._ending: asyncio.Task[None] | None = None

    def accepted_on(self, port: int) -> None:
        """Set the port that the server listens on. Without it, no connection is ended."""
        self._port = port

    def end(self, peer: str) -> None:
        """End the connection of a gRPC peer such as `ipv4:127.0.0.1:5000`, soon.

        Its calls then end as if the client had closed it. Does nothing if it has ended, or for a Unix socket.
        """
        client = endpoint_of(peer)
        if client is None or not self._port:
            return
        self._clients.add(client)
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(self._end_all())

    async def _end_all(self) -> None:
        while self._clients:
            clients, self._clients = self._clients, set()
            try:
                await asyncio.to_thread(shut_down, self._port, clients)
            except OSError as error:
                log.warning("connections_not_ended", clients=len(clients), problem=str(error))
                self._clients |= clients
                await asyncio.sleep(RETRY_S)


def endpoint_of(peer: str) -> Endpoint | None:
    """Return the endpoint of a gRPC peer, or None if it is not one of TCP."""
    kind, _, address = unquote(peer).partition(":")
    port = address.rpartition(":")[2]
    return _endpoint(host_of(address), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def shut_down(port: int, clients: set[Endpoint]) -> None:
    """Shut down all sockets of this process that are connected from `port` to one of the clients.

    Raises OSError if the process has no free descriptor.
    """
    for name in os.listdir(_DESCRIPTORS):
        try:
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                _shut_down_if_of(int(name), port, clients)
        except OSError as error:  # closed since, or not connected
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise


def _shut_down_if_of(descriptor: int, port: int, clients: set[Endpoint]) -> None:
    duplicate = os.dup(descriptor)  # the owner may close its descriptor at any time, and use its number again
    try:
        sock = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != port:
            return
        host, client_port = sock.getpeername()[:2]
        if _endpoint(host, client_port) in clients:
            sock.shutdown(socket.SHUT_RDWR)


def _endpoint(host: str, port: int) -> Endpoint | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.packed, port
