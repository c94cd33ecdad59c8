"""Opens listening ports and determines addresses of this machine."""

import errno
import socket
from ipaddress import ip_address
from urllib.parse import unquote

from baton.core.errors import ConfigError

EVERY_ADDRESS = ("", "0.0.0.0", "::")
"""Wildcard addresses, which listen on every address of the machine."""
_NOT_REACHABLE = ("127.", "::1", "fe80:")
_REMOTE = ("192.0.2.1", 9)
"""Address reserved for documentation; connecting a UDP socket to it sends nothing."""


def listen(host: str, port: int, *, flag: str) -> socket.socket:
    """Open a non-blocking TCP listening socket on `port` (0: a free one), without Nagle's delay.

    Raises ConfigError naming port and `flag` if the port is in use or the address is not of this machine.
    """
    sock = _bind(host, port, flag)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.listen(2048)
    sock.setblocking(False)
    return sock


def choose_port(host: str, port: int, *, flag: str) -> int:
    """Return `port` if it is free, or a free port for 0, for servers that open their socket themselves.

    Another process may take the port before the server binds it, so the server must still handle a bind
    error. Raises ConfigError as `listen` does.
    """
    with _bind(host, port, flag) as sock:
        chosen: int = sock.getsockname()[1]
        return chosen


def reserve_port(host: str, port: int, *, flag: str) -> socket.socket:
    """Bind `port`, or a free one for 0, until the socket is closed. No outgoing connection gets it meanwhile.

    On Linux, a server that sets SO_REUSEADDR, as all of ours do, can listen on it, and again after a restart.
    Raises ConfigError as `listen` does.
    """
    return _bind(host, port, flag)


def advertised_host(host: str, advertise_host: str | None) -> str:
    """Return the address at which others reach a service that listens on `host`.

    It is `advertise_host` if set, else `host`. If `host` is a wildcard, it is this machine's address towards
    other networks.
    """
    if advertise_host:
        return advertise_host
    return outward_address() if host in EVERY_ADDRESS else host


def local_host(host: str) -> str:
    """Return the host by which this machine reaches a service that listens on `host`."""
    if host in EVERY_ADDRESS:
        return "::1" if ":" in host else "127.0.0.1"
    return host


def outward_address() -> str:
    """Return this machine's address towards other networks, or the loopback address without a route.

    Sends no packet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(_REMOTE)
        except OSError:
            return "127.0.0.1"
        address: str = sock.getsockname()[0]
        return address


def join_address(host: str, port: int) -> str:
    """Format `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of an address formatted by `join_address`."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_this_machine(peer: str) -> bool:
    """Return True if a gRPC peer such as `ipv4:127.0.0.1:5000` is a process of this machine.

    An empty peer is a caller in the same process.
    """
    kind, _, address = unquote(peer).partition(":")
    if not peer or kind == "unix":
        return True
    host = host_of(address).strip("[]")
    try:
        return ip_address(host).is_loopback or host in own_addresses()
    except ValueError:
        return False


def own_addresses() -> frozenset[str]:
    """Return the addresses of this machine that other machines may reach, so without the loopback."""
    import psutil  # imported here because it is slow and rarely needed

    return frozenset(
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith(_NOT_REACHABLE)
    )


def _bind(host: str, port: int, flag: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}, which is not a valid address: {error.strerror or error}"
        ) from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with {flag}, or 0 for a free one"
            ) from error
        raise ConfigError(f"cannot listen on {join_address(host, port)} ({flag}): {error.strerror}") from error
    return sock
