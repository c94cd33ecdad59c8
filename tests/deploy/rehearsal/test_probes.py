"""Probes against servers in this process."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.deploy.conftest import Rendered
from tests.deploy.objects import workloads
from tests.deploy.rehearsal.probes import why_failing
from tests.free_port import free_port

HERE = "127.0.0.1"
LONG_LIMITS = {"timeoutSeconds": 60}  # a busy machine answers late


def never(argv: Sequence[str], limit_s: float) -> int:
    raise AssertionError("not asked for")


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/ready": 200, "/moved": 302}.get(self.path, 503))
        self.end_headers()
        self.wfile.write(b"some words")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def http_port() -> Iterator[int]:
    with HTTPServer((HERE, 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_http_probe(http_port: int) -> None:
    def asked(path: str) -> str:
        return why_failing({"httpGet": {"path": path, "port": http_port}, **LONG_LIMITS}, HERE, never)

    assert (asked("/ready"), asked("/moved"), asked("/other")) == ("", "", "status 503: some words")


def test_socket_probe(http_port: int) -> None:
    assert why_failing({"tcpSocket": {"port": http_port}, **LONG_LIMITS}, HERE, never) == ""
    assert "refused" in why_failing({"tcpSocket": {"port": 1}, **LONG_LIMITS}, HERE, never)


def test_grpc_probe() -> None:
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    probe = {"grpc": {"port": server.add_insecure_port(f"{HERE}:{free_port(HERE)}")}, **LONG_LIMITS}
    server.start()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    serving = why_failing(probe, HERE, never)
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    draining = why_failing(probe, HERE, never)
    server.stop(None).wait()

    assert (serving, draining) == ("", "status 2")
    assert "UNAVAILABLE" in why_failing(probe, HERE, never)


def test_command_probe() -> None:
    asked: list[tuple[Sequence[str], float]] = []

    def run(argv: Sequence[str], limit_s: float) -> int:
        asked.append((argv, limit_s))
        return len(asked) - 1

    probe = {"exec": {"command": ["some", "thing"]}, "timeoutSeconds": 3}
    assert (why_failing(probe, HERE, run), why_failing(probe, HERE, run)) == ("", "exit code 1")
    assert asked == [(["some", "thing"], 3.0)] * 2


def test_unknown_kind_of_probe_raises() -> None:
    with pytest.raises(ValueError, match="no known kind"):
        why_failing({"periodSeconds": 1}, HERE, never)


def test_every_probe_of_the_chart_is_of_a_known_kind(rendered: Rendered) -> None:
    kinds = {
        kind
        for workload in workloads(rendered("default"))
        for container in workload.containers
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        for kind in container.get(probe, {})
        if not kind.endswith(("Seconds", "Threshold"))
    }
    assert kinds == {"httpGet", "tcpSocket", "grpc"}
