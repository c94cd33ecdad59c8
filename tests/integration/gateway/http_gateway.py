"""Runs a gateway behind a real HTTP server on loopback, with stub workers in the same process."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from baton.core.client_api import ProcessInfo
from baton.core.request_limits import MIN_READ_RATE
from baton.gateway.auth.api_keys import KeyRing
from baton.gateway.grpc.inference_service import AdminService
from baton.gateway.http.http_app import HttpApp
from baton.gateway.http.http_server import HttpServer
from baton.gateway.http.site.cors import Cors
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.network.addresses import listen
from baton.runtime.network.tls_files import CertificatePair
from baton.runtime.observability.metrics import expose
from baton.runtime.process.byte_budget import Account
from baton.runtime.process.shared_account import SharedAccount
from tests.unit.gateway.fakes import LONG_LIMITS, Cluster, cluster

JSON = {"content-type": "application/json"}


@dataclass(slots=True, kw_only=True)
class HttpGateway:
    cluster: Cluster
    port: int
    client: httpx.AsyncClient
    server: HttpServer
    app: HttpApp

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(
        self, path: str, body: Any = None, *, content: bytes | None = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        if content is None:
            return await self.client.post(path, json=body, headers=headers)
        return await self.client.post(path, content=content, headers=JSON if headers is None else headers)

    async def connect(self, first: bytes = b"") -> "RawConnection":
        """Connect with a small receive buffer, so that unread bytes soon block the sender.

        first: few bytes that the server, which runs in this loop, finds when it accepts the connection.
        """
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", self.port))
        sock.sendall(first)
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        return RawConnection(reader=reader, writer=writer)


@dataclass(slots=True, kw_only=True)
class RawConnection:
    """A TCP connection that sends raw bytes, for misbehaving clients."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    seen: bytearray = field(default_factory=bytearray)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_until_closed(self, timeout_s: float = 20.0) -> bytes:
        async with asyncio.timeout(timeout_s):
            try:
                while data := await self.reader.read(65536):
                    self.seen += data
            except ConnectionError:  # a reset, or a broken pipe if a write notices it first
                pass
        return bytes(self.seen)

    async def read_until(self, text: bytes, timeout_s: float = 20.0) -> bytes:
        async with asyncio.timeout(timeout_s):
            while text not in self.seen:
                data = await self.reader.read(65536)
                assert data, f"the connection closed before {text!r}: {bytes(self.seen)!r}"
                self.seen += data
        return bytes(self.seen)

    async def read_slowly(self, max_bytes: int) -> None:
        """Read a few bytes and pause. A connection that the gateway has just reset has nothing to read."""
        with suppress(ConnectionError):
            await self.reader.read(max_bytes)
        await asyncio.sleep(0.02)

    async def close(self) -> None:
        self.writer.close()


def request_bytes(path: str, body: bytes, *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def stream_events(gateway: HttpGateway, path: str, body: dict[str, Any]) -> list[Any]:
    """Stream a response. Returns the JSON of its server-sent events, without the final `[DONE]`."""
    answer = await gateway.post(path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, end = answer.text.split("\n\n")
    assert end == ""
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@asynccontextmanager
async def http_gateway(
    *workers: tuple[str, str],
    tokenizer: Tokenizer | None = None,
    receive_deadline_s: float = 30.0,
    unread_s: float = 30.0,
    ended_unread_s: float | None = None,
    min_read_rate: int = MIN_READ_RATE,
    max_body_bytes: int = 8 * 2**20,
    keys: KeyRing | None = None,
    tls: CertificatePair | None = None,
    max_connections: int = 4096,
    cors_allow_origins: tuple[str, ...] = (),
    send_buffer_bytes: int | None = None,
    **limits: Any,
) -> AsyncIterator[HttpGateway]:
    """Run a gateway.

    send_buffer_bytes: size of the kernel's buffers for what clients do not read. None: as the kernel chooses,
        up to some MB.
    """
    async with cluster(*workers, tokenizer=tokenizer, keys=keys, **LONG_LIMITS | limits) as c:
        sock = listen("127.0.0.1", 0, flag="--http-port")
        if send_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)  # connections inherit it
        app = HttpApp(
            c.gateway,
            AdminService(c.gateway, ProcessInfo(process_id="gateway-0")),
            max_body_bytes=max_body_bytes,
            unread_s=unread_s if ended_unread_s is None else ended_unread_s,
            min_read_rate=min_read_rate,
            metrics=lambda: expose(c.registry),
            created=1_700_000_000,
        )
        async with (
            HttpServer(
                Cors(app, cors_allow_origins) if cors_allow_origins else app,
                sock,
                receive_deadline_s=receive_deadline_s,
                unread_s=unread_s,
                max_connections=max_connections,
                heads=SharedAccount(c.gateway.budget, Account.HEADS, "the request head"),
                tls=tls,
            ) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client,
        ):
            yield HttpGateway(cluster=c, port=server.port, client=client, server=server, app=app)
