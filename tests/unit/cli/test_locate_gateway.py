"""Which gateway a command asks: the named one, or the newest running cluster."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from baton.cli.admin import locate_gateway as locate_gateway_module
from baton.cli.admin.gateway_connection import GatewayAddress
from baton.cli.admin.locate_gateway import DEFAULT_GATEWAY, GatewayChoice, Located, describe_clusters, locate_gateway
from baton.core.errors import BatonError
from baton.runtime.process.run_file import RunningCluster


@pytest.fixture(autouse=True)
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the server threads of this file enough time."""
    monkeypatch.setattr(locate_gateway_module, "ANSWER_S", 60.0)


def cluster(port: int, started_s: float = 0.0, **changes: Any) -> RunningCluster:
    facts = {"pid": port, "identity": "", "cluster": "default", "model": "demo"}
    addresses = {"url": f"http://127.0.0.1:{port}", "gateway": f"127.0.0.1:{port + 1}"}
    return RunningCluster(started_s=started_s, **{**facts, **addresses, **changes})


def locate(*running: RunningCluster, must_be_unique: bool = False, **choice: str) -> Located:
    return locate_gateway(GatewayChoice(**choice), running, must_be_unique=must_be_unique)


def test_default_port_is_used_if_no_cluster_runs() -> None:
    assert locate(api_key="k").gateway == GatewayAddress(DEFAULT_GATEWAY, "k")


def test_only_cluster_is_used_with_its_certificate() -> None:
    found = locate(cluster(70, ca="ca.pem", name="n"), must_be_unique=True)
    assert found == Located(gateway=GatewayAddress("127.0.0.1:71", "", "ca.pem", "n"))
    assert locate(cluster(70, ca="ca.pem"), ca="other.pem").gateway.ca == "other.pem"


def test_newest_of_several_is_used_and_all_are_listed() -> None:
    found = locate(cluster(80), cluster(70))
    assert found.gateway.address == "127.0.0.1:81"
    assert "2 clusters" in found.note
    assert "127.0.0.1:71" in found.note


def test_command_that_changes_the_cluster_does_not_choose_between_several() -> None:
    with pytest.raises(BatonError, match=r"choose one with --gateway\n.*127.0.0.1:81(.|\n)*127.0.0.1:71"):
        locate(cluster(80), cluster(70), must_be_unique=True)
    assert locate(cluster(80), cluster(70), must_be_unique=True, address="127.0.0.1:71").gateway.address.endswith("71")


def test_named_address_wins_and_still_gets_the_known_certificate() -> None:
    running = cluster(80), cluster(70, ca="ca.pem")
    assert locate(*running, address="localhost:71").gateway == GatewayAddress("localhost:71", ca="ca.pem")
    assert locate(*running, address="h:1").gateway == GatewayAddress("h:1")


def test_url_of_a_running_cluster_is_recognized() -> None:
    for url in ("http://localhost:70/", "127.0.0.1:70"):
        assert locate(cluster(80), cluster(70), url=url).gateway.address == "127.0.0.1:71"


@contextmanager
def gateway_that_answers(status: int, body: bytes) -> Iterator[tuple[str, list[str | None]]]:
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("authorization"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [200, 503])
def test_url_of_an_unknown_gateway_is_asked_for_its_grpc_port(status: int) -> None:
    with gateway_that_answers(status, b'{"grpc_port": 77}') as (url, keys):
        assert locate(url=url, api_key="k").gateway == GatewayAddress("127.0.0.1:77", "k")
    assert keys == ["Bearer k"]


@pytest.mark.parametrize("body", [b"{}", b"[]", b"no json", b'{"grpc_port": 0}'])
def test_url_that_leads_to_no_gateway_is_an_error(body: bytes) -> None:
    with gateway_that_answers(200, body) as (url, _), pytest.raises(BatonError, match="use --gateway HOST:PORT"):
        locate(url=url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://a b:80", "http://[::1", "[::1", "http://"])
def test_malformed_url_is_an_error_that_names_it(url: str) -> None:
    with pytest.raises(BatonError, match=r"no gateway answers at .*correct --url"):
        locate(cluster(80), url=url)


def test_malformed_address_is_no_cluster_and_stays_as_given() -> None:
    assert locate(cluster(80), address="[::1:8001").gateway.address == "[::1:8001"


def test_grpc_port_given_as_url_is_recognized() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00")  # SETTINGS

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BatonError, match="Is this the gRPC port"):
            locate(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_age_is_shown_in_one_unit() -> None:
    lines = describe_clusters([cluster(70, 1000.0), cluster(80, 1000.0 - 7200)], now_s=1042.0).splitlines()
    assert "up 42 s" in lines[0]
    assert "up 2 h" in lines[1]
