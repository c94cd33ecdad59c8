"""The commands that `baton up` prints: correct for ports, keys, certificates and odd names."""

import json
import shlex
from pathlib import Path
from typing import Any

from baton.fleet.hints import curl_hint, explain_hint, key_hint
from baton.fleet.up import describe_running
from baton.runtime.config.settings import ClusterConfig
from tests.certificates import Authority


def describe(url: str = "http://127.0.0.1:9000", gateway: str = "127.0.0.1:9001", **settings: Any) -> Any:
    return describe_running(ClusterConfig(**settings), url, gateway, None)


def test_commands_carry_the_real_ports() -> None:
    cluster, cacert = describe()
    words = shlex.split(curl_hint(cluster, cacert=cacert))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:9000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "demo"
    assert explain_hint(cluster) == "baton explain last --gateway 127.0.0.1:9001"
    assert key_hint(cluster) == ""


def test_commands_name_the_key_if_keys_are_on(tmp_path: Path) -> None:
    cluster, _ = describe(api_keys=tmp_path / "keys.yaml")
    assert '-H "authorization: Bearer $BATON_API_KEY"' in curl_hint(cluster)
    assert explain_hint(cluster).endswith('--api-key "$BATON_API_KEY"')
    assert "export BATON_API_KEY" in key_hint(cluster)


def test_commands_of_a_gateway_with_tls_name_its_authority_and_its_name(tmp_path: Path) -> None:
    authority = Authority.new(tmp_path / "a dir")
    front = authority.pair("front", "baton.example")
    service = authority.pair("service", "baton.internal")
    cluster, cacert = describe(
        "https://127.0.0.1:9000",
        front_tls_cert=front.certificate,
        front_tls_key=front.key,
        tls_cert=service.certificate,
        tls_key=service.key,
        tls_ca=authority.file,
    )
    ca = str(authority.file)
    words = shlex.split(curl_hint(cluster, cacert=cacert))
    assert words[2:7] == [
        "--connect-to",
        "baton.example:9000:127.0.0.1:9000",
        "--cacert",
        ca,
        "https://baton.example:9000/v1/chat/completions",
    ]
    asked = shlex.split(explain_hint(cluster))
    assert asked[-4:] == ["--gateway-ca", ca, "--gateway-name", "baton.example"]


def test_unknown_authority_is_a_placeholder(tmp_path: Path) -> None:
    front = Authority.new(tmp_path / "a").pair("front", "127.0.0.1")
    cluster, cacert = describe("https://127.0.0.1:9000", front_tls_cert=front.certificate, front_tls_key=front.key)
    assert "--cacert CA.pem" in curl_hint(cluster, cacert=cacert)
    assert "--gateway-ca CA.pem" in explain_hint(cluster)
    assert cluster.ca == ""


def test_model_name_with_quotes_stays_one_argument() -> None:
    cluster, _ = describe("http://[::1]:9000", served_model_name="it's $HOME")
    words = shlex.split(curl_hint(cluster))
    assert words[2] == "http://[::1]:9000/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "it's $HOME"
