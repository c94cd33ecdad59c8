"""Names in the requested certificates, and their verification by `helm test`."""

import http.server
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.rpc.grpc_tls import SERVICE_NAME
from tests.certificates import Authority
from tests.deploy.conftest import Rendered
from tests.deploy.objects import named, of_kind
from tests.deploy.renderer import Renderer

SERVICE = "rel-baton-gateway"
PUBLIC = "llm.example.com"
OWN_AUTHORITY = "/etc/baton/front-ca/ca.crt"
ISSUER = {"kind": "ClusterIssuer", "name": "letsencrypt"}
LIMIT_S = 30.0


def front_names(docs: Any) -> list[str]:
    names: list[str] = named(docs, "Certificate", "rel-baton-front-tls")["spec"]["dnsNames"]
    return names


def test_public_issuer_gets_only_public_names(helm: Renderer) -> None:
    values = {
        "frontTls": {"enabled": True, "dnsNames": [PUBLIC], "certManager": {"enabled": True, "issuerRef": ISSUER}}
    }

    assert front_names(helm.docs(values)) == [PUBLIC]


def test_default_name_is_the_gateway_service(rendered: Rendered) -> None:
    assert front_names(rendered("front-issuer")) == [SERVICE, f"{SERVICE}.serving", f"{SERVICE}.serving.svc"]


def test_service_certificates_have_one_name(rendered: Rendered) -> None:
    (certificate,) = (
        doc for doc in of_kind(rendered("tls-issuer"), "Certificate") if doc["metadata"]["name"] == "rel-baton-tls"
    )

    assert certificate["spec"]["dnsNames"] == [SERVICE_NAME]


def test_publicly_signed_certificate_needs_no_ca_file(rendered: Rendered) -> None:
    (volume,) = (
        each
        for each in named(rendered("front-tls"), "Pod", "rel-baton-test")["spec"]["volumes"]
        if each["name"] == "front-ca"
    )

    assert volume["secret"]["optional"] is True
    for doc in of_kind(rendered("front-tls"), "Deployment"):
        assert "ca.crt" not in json.dumps(doc), doc["metadata"]["name"]


class Gateway(http.server.BaseHTTPRequestHandler):
    """Responds as a gateway whose model generates one token."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        has_key = self.headers["authorization"] == "Bearer the-key"
        answer = json.dumps(
            {"model": asked["model"], "usage": {"completion_tokens": int(has_key and self.path == "/v1/completions")}}
        )
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def gateway(context: ssl.SSLContext | None) -> Iterator[int]:
    """Run such a gateway and yield its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def helm_test(
    docs: Any, port: int, *, own: Path | None = None, trusted: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the program of the test pod in its environment, with its Service on this machine.

    own: the mounted CA file of the Secret.
    trusted: the CA file of the system.
    """
    (container,) = named(docs, "Pod", "rel-baton-test")["spec"]["containers"]
    environment = {variable["name"]: variable.get("value", "the-key") for variable in container["env"]}
    environment |= {
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "SSL_CERT_FILE": str(trusted or "/nonexistent"),
        "SSL_CERT_DIR": "/nonexistent",
    }
    (program,) = container["args"]
    if own is not None:
        program = program.replace(OWN_AUTHORITY, str(own))
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.parametrize(("name", "in_certificate"), [("all-on", PUBLIC), ("front-issuer", SERVICE)])
@pytest.mark.parametrize("signed_by", ["own", "trusted"])
def test_helm_test_accepts_the_requested_certificate(
    rendered: Rendered, tmp_path: Path, name: str, in_certificate: str, signed_by: str
) -> None:
    authority = Authority.new(tmp_path / "authority")
    pair = authority.pair("gateway", in_certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    empty = tmp_path / "empty"
    empty.touch()  # as some versions of cert-manager leave it
    with gateway(context) as port:
        if signed_by == "own":
            done = helm_test(rendered(name), port, own=authority.file)
        else:
            done = helm_test(rendered(name), port, own=empty, trusted=authority.file)
        stranger = helm_test(rendered(name), port)

    assert (done.returncode, done.stderr) == (0, "")
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.stderr


def test_helm_test_rejects_a_certificate_with_another_name(rendered: Rendered, tmp_path: Path) -> None:
    authority = Authority.new(tmp_path / "authority")
    pair = authority.pair("gateway", "somebody.example.com")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with gateway(context) as port:
        done = helm_test(rendered("all-on"), port, own=authority.file)

    assert "Hostname mismatch" in done.stderr


def test_helm_test_works_without_tls(rendered: Rendered) -> None:
    with gateway(None) as port:
        assert helm_test(rendered("default"), port).returncode == 0
