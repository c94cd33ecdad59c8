"""Ports and addresses of this machine."""

import errno
import socket

from baton.core.errors import ConfigError

EVERY_ADDRESS = ("", "0.0.0.0", "::")
"""What a service listens on to be reached at every address of its machine."""
_OF_THIS_MACHINE_ALONE = ("127.", "::1", "fe80:")
_ELSEWHERE = ("192.0.2.1", 9)
"""An address reserved for documentation: asking for the way there sends nothing."""


def listen(host: str, port: int, *, flag: str) -> socket.socket:
    """A listening TCP socket with Nagle's delay off, on `port`, or on a free one for 0.

    Raises ConfigError naming port and `flag` when the port is taken or the address is not this machine's.
    """
    sock = _bind(host, port, flag)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.listen(2048)
    sock.setblocking(False)
    return sock


def choose_port(host: str, port: int, *, flag: str) -> int:
    """`port` if nobody listens there, a free one for 0; for servers that open their socket themselves.

    Someone else may take it in between: such a server must still check its own bind. Raises ConfigError as
    `listen` does.
    """
    with _bind(host, port, flag) as sock:
        chosen: int = sock.getsockname()[1]
        return chosen


def advertised_host(host: str, advertise_host: str | None) -> str:
    """The address under which others reach a service that listens on `host`: the given one, `host` itself,
    or, where that means "every address", the one this machine would use towards other networks."""
    if advertise_host:
        return advertise_host
    return outward_address() if host in EVERY_ADDRESS else host


def outward_address() -> str:
    """This machine's address towards other networks; the loopback's where there is no way out. Sends
    nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(_ELSEWHERE)
        except OSError:
            return "127.0.0.1"
        address: str = sock.getsockname()[0]
        return address


def join_address(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of `join_address`'s `host:port`."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def own_addresses() -> frozenset[str]:
    """The addresses of this machine at which others may reach it: not those of the loopback."""
    import psutil  # takes a while, and only few ask

    return frozenset(
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith(_OF_THIS_MACHINE_ALONE)
    )


def _bind(host: str, port: int, flag: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"{host} is no address to listen on: {error.strerror or error}") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken; choose another with {flag}, or 0 for a free one"
            ) from error
        raise ConfigError(f"cannot listen on {join_address(host, port)} ({flag}): {error.strerror}") from error
    return sock
