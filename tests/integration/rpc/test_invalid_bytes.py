"""Invalid HTTP and HTTP/2 on an internal port ends only its own connection (F-22)."""

import asyncio
import re
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.integration.rpc.checked_cluster import EXCHANGE, PLACE, SESSION, CheckedCluster
from tests.invalid_requests import mutated_bytes
from tests.malformed_connections import HTTP2_START, Canary, broken_http2, exchange, grpc_call, grpc_message
from tests.scale import sized

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


async def test_broken_http2_on_internal_ports_ends_only_its_connection(cluster: CheckedCluster, tmp_path: Path) -> None:
    rng, canary, slots = Random(22), Canary(tmp_path), asyncio.Semaphore(16)

    async def send(port: int, data: bytes) -> None:
        async with slots:
            await exchange(port, [data], quiet_s=0.15)

    for name, path, first_message in (
        ("h0", SESSION, cluster.hello()),
        ("h0", EXCHANGE, cluster.peer_hello()),
        ("scheduler", PLACE, b""),
    ):
        valid = HTTP2_START + grpc_call(path, grpc_message(first_message))
        mutated = [mutated_bytes(rng, valid) for _ in range(sized(20, 500))]
        broken = [] if path == EXCHANGE else [*broken_http2(path).values()]
        await asyncio.gather(*(send(cluster.ports[name], data) for data in (*broken, *mutated, *canary.payloads)))
        await cluster.check()
    canary.check()


async def test_any_bytes_on_admin_ports_are_answered_or_closed(cluster: CheckedCluster, tmp_path: Path) -> None:
    rng, canary, slots = Random(23), Canary(tmp_path), asyncio.Semaphore(16)
    valid = b"GET /metrics?x=%41 HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\n\r\n"
    post = b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + bytes(10_000)
    upgrade = (
        b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: eA==\r\n\r\n"
    )

    async def send(port: int, chunks: list[bytes]) -> None:
        async with slots:
            received = await exchange(port, chunks, quiet_s=0.15)
            assert not re.match(rb"HTTP/1\.1 5", received.data), (chunks, received)

    for name, port in cluster.admin_ports.items():
        mutated = [mutated_bytes(rng, valid) for _ in range(sized(15, 300))]
        await asyncio.gather(
            *(send(port, [data]) for data in (*mutated, *canary.payloads, post, upgrade, bytes(range(256)) * 40))
        )
        before_bytes = cluster.processes[name].memory_info().rss
        for endless in (b"y" * 2**20, (b"x: " + b"y" * 1000 + b"\r\n") * 1000):
            await send(port, [b"GET /health HTTP/1.1\r\nx: ", *[endless] * 64])
        assert cluster.processes[name].memory_info().rss - before_bytes < 16 * 2**20
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
    canary.check()
    await cluster.check()
