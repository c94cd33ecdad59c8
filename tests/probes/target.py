"""The gateway under test: how to reach it, and how its memory and event loop are watched."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

MIB = 2**20
LOOK_S = 0.05
HEALTH_S = 10.0
"""Timeout of `/health`. It finds an event loop that waits without using CPU time."""


@dataclass(slots=True)
class Watch:
    """What was seen of the gateway while a probe ran.

    grown_bytes: largest resident memory minus that at the begin.
    health_cpu_s: most CPU time of the event loop during one request of `/health`. On a busy machine the
        response time is longer.
    """

    grown_bytes: int = 0
    health_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A gateway.

    url: its HTTP API.
    grpc_port: port of its gRPC API on the same host.
    pid: its process on this machine.
    redis_url: the Redis of its cluster, or None if no probe may fill it.
    """

    url: str
    grpc_port: int
    pid: int
    redis_url: str | None = None
    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=240.0))

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def loop_cpu_s(self) -> float:
        """Return the CPU seconds of the gateway's event loop so far, which runs on its main thread."""
        (main,) = [thread for thread in psutil.Process(self.pid).threads() if thread.id == self.pid]
        return float(main.user_time + main.system_time)

    async def complete(self, body: Mapping[str, Any]) -> httpx.Response:
        """Send a completion request and return the whole response."""
        return await self.http.post(f"{self.url}/v1/completions", json=dict(body))

    async def is_serving(self) -> bool:
        """True if a small request is answered."""
        response = await self.complete({"prompt": "hello", "max_tokens": 2})
        return response.status_code == 200

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[str]:
        """Send a streaming request and yield the data of its events."""
        request = {**body, "stream": True}
        async with self.http.stream("POST", f"{self.url}/v1/completions", json=request) as response:
            async for line in response.aiter_lines():
                if line:
                    yield line.removeprefix("data: ")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection with a small receive buffer, so that unread bytes soon fill the sender's."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, self.address)
        return await asyncio.open_connection(sock=raw, limit=65536)

    def request_bytes(self, body: Mapping[str, Any] | bytes) -> bytes:
        """Return a completion request as bytes of HTTP/1.1."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: probe\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        return head.encode() + content

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Watch]:
        """Watch memory and event loop while the block runs.

        Raises httpx.TimeoutException if `/health` did not answer within `HEALTH_S`.
        """
        watch = Watch()
        process = psutil.Process(self.pid)
        begin_bytes = process.memory_info().rss
        sent_cpu_s = self.loop_cpu_s()

        def take() -> None:
            watch.grown_bytes = max(watch.grown_bytes, process.memory_info().rss - begin_bytes)
            watch.health_cpu_s = max(watch.health_cpu_s, self.loop_cpu_s() - sent_cpu_s)

        async def measure_memory() -> None:
            while True:
                take()
                await asyncio.sleep(LOOK_S)

        async def ask_health() -> None:
            nonlocal sent_cpu_s
            async with httpx.AsyncClient(timeout=HEALTH_S) as client:
                while True:
                    sent_cpu_s = self.loop_cpu_s()
                    await client.get(f"{self.url}/health")
                    take()
                    sent_cpu_s = self.loop_cpu_s()
                    await asyncio.sleep(LOOK_S)

        tasks = [asyncio.create_task(measure_memory()), asyncio.create_task(ask_health())]
        try:
            yield watch
        finally:
            take()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
