"""Connections of a server in this process end by the address of their client."""

import asyncio
import errno
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.runtime.network import client_connections
from baton.runtime.network.client_connections import ClientConnections, endpoint_of

HIGH_DESCRIPTOR = 900
"""Lowest number of a descriptor that no other thread of this process gets by chance."""


@asynccontextmanager
async def accepted(listen: str, connect: str) -> AsyncIterator[tuple[ClientConnections, list[socket.socket]]]:
    """Yield the connections of a server that has accepted two clients, and the sockets of these clients."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::") as server:
        port = server.getsockname()[1]
        clients = [socket.create_connection((connect, port)) for _ in range(2)]
        served = [server.accept()[0] for _ in clients]
        connections = ClientConnections()
        connections.accepted_on(port)
        try:
            yield connections, clients
        finally:
            for sock in (*clients, *served):
                sock.close()


async def has_ended(client: socket.socket, wait_s: float) -> bool:
    client.setblocking(False)
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), wait_s) == b""
    except TimeoutError:
        return False


def ipv4_peer(client: socket.socket) -> str:
    return f"ipv4:127.0.0.1:{client.getsockname()[1]}"


def ipv6_peer(client: socket.socket) -> str:
    return f"ipv6:%5B::1%5D:{client.getsockname()[1]}"


@pytest.mark.parametrize(
    ("listen", "connect", "peer_of"),
    [("127.0.0.1", "127.0.0.1", ipv4_peer), ("::1", "::1", ipv6_peer), ("::", "127.0.0.1", ipv4_peer)],
    ids=["IPv4", "IPv6", "IPv4 over IPv6"],
)
async def test_only_the_connection_of_the_client_ends(
    listen: str, connect: str, peer_of: Callable[[socket.socket], str]
) -> None:
    if ":" in listen and not socket.has_ipv6:
        pytest.skip("needs IPv6")
    async with accepted(listen, connect) as (connections, (first, second)):
        connections.end(peer_of(first))
        assert await has_ended(first, 60.0)
        assert not await has_ended(second, 0.05)


async def test_several_connections_end_together() -> None:
    async with accepted("127.0.0.1", "127.0.0.1") as (connections, clients):
        for client in clients:
            connections.end(ipv4_peer(client))
        assert [await has_ended(client, 60.0) for client in clients] == [True, True]


async def test_connection_ends_once_the_process_has_a_free_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2

    def dup(descriptor: int) -> int:
        if failures:
            raise failures.pop()
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD)

    monkeypatch.setattr(client_connections, "RETRY_S", 0.01)
    async with accepted("127.0.0.1", "127.0.0.1") as (connections, (first, _)):
        with monkeypatch.context() as patched:
            patched.setattr("os.dup", dup)
            connections.end(ipv4_peer(first))
            assert await has_ended(first, 60.0)
        assert not failures


def test_number_that_became_a_file_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Duplicates get high numbers: threads of earlier tests may open and close low ones meanwhile."""
    duplicates: list[int] = []

    def dup(descriptor: int) -> int:
        duplicates.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH_DESCRIPTOR))
        return duplicates[-1]

    monkeypatch.setattr("os.dup", dup)
    with open(tmp_path / "file", "w") as file, pytest.raises(OSError, match="non-socket"):
        client_connections._shut_down_if_of(file.fileno(), 1, set())
    (duplicate,) = duplicates
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(duplicate)


async def test_connections_of_other_ports_and_of_unknown_peers_stay() -> None:
    async with accepted("127.0.0.1", "127.0.0.1") as (connections, (first, second)):
        connections.end("unix:/run/socket")
        connections.end("ipv4:127.0.0.1:1")
        connections.accepted_on(1)
        connections.end(ipv4_peer(first))
        assert [await has_ended(client, 0.1) for client in (first, second)] == [False, False]


@pytest.mark.parametrize("peer", ["", "unix:/a", "ipv4:name:80", "ipv4:1.2.3.4", "ipv6:[::1]:x", "vsock:3:1"])
def test_peers_without_a_tcp_address_have_no_endpoint(peer: str) -> None:
    assert endpoint_of(peer) is None
