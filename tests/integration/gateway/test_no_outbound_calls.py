"""Requests with internal fields, addresses, templates or grammars cause no outbound calls (F-39)."""

import asyncio
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.gateway.gateway_process import GatewayProcess, gateway_process, valid_body
from tests.malformed_connections import exchange

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello"}
BOMB = 'root ::= a{1000}\na ::= b{1000}\nb ::= c{1000}\nc ::= "x" | a b c\n'
DEEP: Any = json.loads('{"properties": {"x": ' * 12 + '{"type": "string"}' + "}}" * 12)


def internal_fields(address: str) -> dict[str, Any]:
    """Return fields of other servers and of internal messages, with `address` in all suitable places."""
    host, port = address.rsplit(":", 1)
    url = f"http://{address}/x"
    return {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "remote_host": host,
            "remote_port": int(port),
            "remote_engine_id": url,
            "remote_block_ids": [0, 1],
        },
        "bootstrap_host": host,
        "bootstrap_port": int(port),
        "bootstrap_room": 1,
        "prefill": {"worker_id": "p0", "worker_epoch": 1, "address": address},
        "decode": {"address": address},
        "worker_id": address,
        "decision_id": url,
        "transfer_id": 1,
        "job": {"request_id": url, "attempt": 0},
        "source": {"worker": {"address": address}, "num_blocks": 9},
        "request_id": url,
        "sample_indices": [0],
        "tenant": "other-tenant",
        "data_parallel_rank": 0,
        "lora_path": url,
        "nvext": {"backend_instance_id": 1, "router": url},
        "vllm_xargs": {"endpoint": url},
        "otlp_endpoint": url,
        "trust_remote_code": True,
    }


def templates_and_grammars(url: str) -> dict[str, Any]:
    return {
        "chat_template": "{% for i in range(10**12) %}{{ ''.__class__.__mro__[1].__subclasses__() }}{% endfor %}",
        "guided_grammar": BOMB * 2000,
        "guided_json": DEEP | {"$ref": url},
        "guided_choice": [url] * 10_000,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP | {"$ref": url}}},
        "tools": [{"type": "mcp", "server_url": url, "server_label": "x"}],
        "web_search_options": {"user_location": url},
        "logits_processors": ["os.system"],
    }


def parts_with(url: str) -> list[Any]:
    """Return message contents that a server would have to fetch."""
    return [
        [{"type": "image_url", "image_url": {"url": url}}],
        [{"type": "video_url", "video_url": {"url": url}}],
        [{"type": "audio_url", "audio_url": {"url": url}}],
        [{"type": "file", "file": {"file_id": url}}],
    ]


def rejected_bodies(address: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return (path, word of the error message, body)."""
    url = f"http://{address}/x"
    for path, good in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [HELLO]})):
        for name, value in (internal_fields(address) | templates_and_grammars(url)).items():
            yield path, name, good | {name: value}
        yield path, "model", good | {"model": url}
        yield path, "model", good | {"model": "../../../etc/passwd"}
        yield path, "model", good | {"model": "owner/model-on-a-hub"}
    for content in parts_with(url):
        yield CHAT, "content", {"messages": [{"role": "user", "content": content}]}


def harmless_headers(address: str) -> dict[str, str]:
    """Return headers with which a client may try to trigger a call to `address`."""
    url = f"http://{address}/x"
    names = (
        "x-request-id x-forwarded-for x-forwarded-host forwarded referer origin x-callback-url x-prefill-host-port "
        "baggage via"
    ).split()
    return dict.fromkeys(names, url) | {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "host": address}


async def send_all_requests(gateway: GatewayProcess, address: str) -> None:
    """Send every request that could make the gateway call `address`.

    Each one is rejected with the field's name, or served as if it had not contained the address.
    """
    for path, word, body in rejected_bodies(address):
        answer = await gateway.http.post(
            path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == (404 if word == "model" else 400), (word, answer.text)
        assert word in answer.json()["error"]["message"], answer.text
    url = f"http://{address}/x"
    labels = {
        "callback_url": url,
        "cache_salt": url,
        "user": url,
        "metadata": {"callback": url},
        "safety_identifier": address,
        "prompt_cache_key": url,
    }
    function = {"name": "f", "arguments": "{}"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": url, "type": "function", "function": function}]}
    variables = {
        "chat_template_kwargs": {"x": "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "y": url},
    }
    for path, body, headers in (
        (COMPLETIONS, valid_body(**labels), {}),
        (COMPLETIONS, valid_body(), harmless_headers(address)),
        (CHAT, {"messages": [HELLO], "max_tokens": 4, **variables}, {}),
        (CHAT, {"messages": [HELLO, call, HELLO | {"role": "tool", "tool_call_id": url}], "max_tokens": 4}, {}),
    ):
        answer = await gateway.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert address not in answer.text
        assert url not in answer.headers.values()
    for path in (f"/v1/models/{url}", f"/debug/decisions/{address}", f"/{url}"):
        assert (await gateway.http.get(path)).status_code in (400, 404)
    for line in (f"CONNECT {address} HTTP/1.1", f"GET {url} HTTP/1.1"):
        request = f"{line}\r\nhost: {address}\r\n\r\n".encode()
        response = await exchange(gateway.http_port, [request], until=b"\r\n\r\n", listen_s=60.0, quiet_s=60.0)
        assert response.data.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 ")), response.data
    await gateway.check()


@pytest.mark.fault("F-39")
async def test_addresses_in_requests_are_rejected_and_never_called() -> None:
    """A listener at the named address counts connections."""
    num_calls = 0

    def count_call(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_calls
        num_calls += 1
        writer.close()

    async with await asyncio.start_server(count_call, "127.0.0.1", 0) as listener, gateway_process() as gateway:
        host, port = listener.sockets[0].getsockname()
        await send_all_requests(gateway, f"{host}:{port}")
        assert num_calls == 0
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        async with asyncio.timeout(20):
            while not num_calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


# The same requests in a network namespace that counts all outgoing packets.

EXTERNAL_ADDRESS = "203.0.113.7:80"
"""An address reserved for documentation."""
EXTERNAL_NAME = "callback.example.org:80"
"""A DNS query for this name would count as an outbound packet too."""
_CLONE_NEWNET = 0x40000000


def skip_reason() -> str:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and ip"
    try:
        with packet_counter():
            return ""
    except subprocess.CalledProcessError:
        return "network namespaces cannot be created on this machine"


class PacketCounter:
    """A network namespace with one unconnected interface whose outgoing packets are counted."""

    def __init__(self, name: str) -> None:
        self.name = name

    def num_sent(self) -> int:
        results = subprocess.run(
            ["ip", "-n", self.name, "-s", "-j", "link", "show", "out"], capture_output=True, check=True
        ).stdout
        packets: int = json.loads(results)[0]["stats64"]["tx"]["packets"]
        return packets

    def enter(self) -> None:
        """Move the calling thread, and all that it starts, into the namespace."""
        with open(f"/var/run/netns/{self.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def packet_counter() -> Iterator[PacketCounter]:
    name = f"bo{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    try:
        for words in (
            "link set lo up",
            "link add out type veth peer name beyond",
            "link set out addrgenmode none",  # so that the interface sends nothing by itself
            "link set beyond addrgenmode none",
            "addr add 10.99.99.1/24 dev out",
            "link set beyond up",
            "link set out up",
            "route add default via 10.99.99.2",
        ):
            subprocess.run(["ip", "-n", name, *words.split()], check=True, capture_output=True)
        yield PacketCounter(name)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


async def check_requests_cause_no_packets(counter: PacketCounter) -> None:
    async with gateway_process() as gateway:
        before = counter.num_sent()
        for address in (EXTERNAL_ADDRESS, EXTERNAL_NAME):
            await send_all_requests(gateway, address)
        assert counter.num_sent() == before
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", (EXTERNAL_ADDRESS.partition(":")[0], 80))
    async with asyncio.timeout(20):  # this packet must be counted
        while counter.num_sent() == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.fault("F-39")
def test_requests_cause_no_outbound_packets() -> None:
    if reason := skip_reason():
        pytest.skip(reason)
    with packet_counter() as counter, ThreadPoolExecutor(1, initializer=counter.enter) as thread:
        thread.submit(lambda: asyncio.run(check_requests_cause_no_packets(counter))).result()
