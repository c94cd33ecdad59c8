import socket

import pytest

from baton.core.errors import ConfigError
from baton.runtime.network.addresses import (
    advertised_host,
    choose_port,
    host_of,
    is_this_machine,
    join_address,
    listen,
    outward_address,
    own_addresses,
    reserve_port,
)
from tests.free_port import free_port


def test_listen_on_a_free_port_accepts_connections() -> None:
    with listen("127.0.0.1", 0, flag="--http-port") as server:
        port = server.getsockname()[1]
        assert port > 0
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("claim", [listen, choose_port])
def test_used_port_is_an_error_that_names_port_and_flag(claim: object) -> None:
    with listen("127.0.0.1", 0, flag="--x") as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port} on 127\.0\.0\.1 is in use; choose another with --http-port, or 0"
        ):
            claim("127.0.0.1", port, flag="--http-port")  # type: ignore[operator]


def test_choose_port_returns_the_given_port_or_a_free_one() -> None:
    free = choose_port("127.0.0.1", 0, flag="--http-port")
    assert free > 0
    reserved = free_port("127.0.0.1")
    assert choose_port("127.0.0.1", reserved, flag="--http-port") == reserved


def test_reserved_port_can_be_listened_on_and_is_not_free() -> None:
    with reserve_port("127.0.0.1", 0, flag="--http-port") as reserved:
        port = reserved.getsockname()[1]
        for _ in range(2):  # the second one stands for a server that was started again
            with (
                listen("127.0.0.1", port, flag="--http-port"),
                socket.create_connection(("127.0.0.1", port), timeout=5),
            ):
                pass
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_reserving_a_used_port_is_an_error() -> None:
    with listen("127.0.0.1", 0, flag="--x") as server, pytest.raises(ConfigError, match="is in use"):
        reserve_port("127.0.0.1", server.getsockname()[1], flag="--http-port")


def test_listen_on_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0 \(--http-port\)"):
        listen("192.0.2.1", 0, flag="--http-port")


@pytest.mark.parametrize("host", ["10.0.0.1", "node-7", "fd00::1"])
def test_host_of_returns_the_host_of_join_address(host: str) -> None:
    assert host_of(join_address(host, 80)) == host


def test_own_addresses_exclude_loopback_and_include_the_outward_address() -> None:
    found = own_addresses()
    assert not {"127.0.0.1", "::1"} & found
    assert outward_address() in found | {"127.0.0.1"}


def test_advertised_host_of_a_wildcard_is_the_given_host_or_the_outward_address() -> None:
    assert advertised_host("127.0.0.1", None) == "127.0.0.1"
    assert advertised_host("0.0.0.0", "node-7") == "node-7"
    assert advertised_host("0.0.0.0", None) == outward_address()
    socket.inet_aton(outward_address())


def test_join_address_brackets_ipv6_hosts() -> None:
    assert join_address("127.0.0.1", 80) == "127.0.0.1:80"
    assert join_address("::1", 80) == "[::1]:80"


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("", True),
        ("unix:", True),
        ("ipv4:127.0.0.1:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv4:192.0.2.7:5000", False),
        ("ipv6:[2001:db8::1]:5000", False),
        ("ipv4:nonsense", False),
    ],
)
def test_peer_of_this_machine_is_recognized(peer: str, expected: bool) -> None:
    assert is_this_machine(peer) == expected
    for address in own_addresses():
        assert is_this_machine(f"ipv4:{address}:1") or ":" in address
