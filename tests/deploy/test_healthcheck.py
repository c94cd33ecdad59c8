"""The health check of the image, against a port with and without TLS."""

import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

SCRIPT = Path(__file__).parents[2] / "deploy" / "healthcheck.py"
MAX_TRIALS = 5


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(params=["http", "https"])
def server(request: pytest.FixtureRequest) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Health,), {})) as server:
        if request.param == "https":
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check(port: int) -> subprocess.CompletedProcess[str]:
    """Run the health check, and again if the server of a busy machine did not answer in time."""
    environment = {**os.environ, "BATON_ADMIN_PORT": str(port)}
    for _ in range(MAX_TRIALS):
        done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
        if "timed out" not in done.stderr:
            break
    return done


def test_health_is_found_with_and_without_tls(server: ThreadingHTTPServer) -> None:
    assert check(server.server_port).returncode == 0
    server.RequestHandlerClass.status = 503  # type: ignore[attr-defined]
    failed = check(server.server_port)
    assert failed.returncode == 1
    assert "503" in failed.stderr


def test_reason_is_printed_if_nothing_listens() -> None:
    failed = check(9)
    assert failed.returncode == 1
    assert "http://127.0.0.1:9/health" in failed.stderr
