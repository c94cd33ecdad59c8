"""Limits of client connections, and of what clients send before they are authenticated."""

import asyncio
import ssl
import tracemalloc
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from baton.gateway.http.tls_acceptor import TlsAcceptor
from baton.rpc.channel import UNREAD_WINDOW_BYTES
from baton.rpc.grpc_server import GrpcServer
from baton.runtime.network.addresses import listen
from baton.runtime.process.byte_budget import Account
from tests.certificates import Authority
from tests.integration.gateway.http_gateway import RawConnection, http_gateway, request_bytes
from tests.integration.gateway.test_bounded_grpc import read_frame, served, unfinished_call
from tests.malformed_connections import HEADERS, HTTP2_START
from tests.scale import sized
from tests.unit.gateway.fakes import until

pytestmark = pytest.mark.integration
HYBRID = ("h0", "hybrid")
GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
UNFINISHED = b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: "


async def settled(connections: list[RawConnection]) -> None:
    """Wait until the server has accepted these connections: it answers a request on the last one."""
    await connections[-1].send(GET_HEALTH)
    await connections[-1].read_until(b"\r\n\r\n")


async def test_http_connection_over_the_limit_gets_429_and_a_closed_one_makes_way() -> None:
    async with http_gateway(HYBRID, max_connections=3) as gateway:
        open_ = [await gateway.connect() for _ in range(3)]
        await settled(open_)
        refused = await (await gateway.connect()).read_until_closed()
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"3 connections are open, which is the limit" in refused
        assert b"--max-connections" in refused
        await open_[0].close()
        await until(lambda: len(gateway.server.connections) < 3, timeout_s=20)
        await settled([await gateway.connect()])


async def test_unfinished_tls_handshakes_count_as_connections(tmp_path: Path) -> None:
    pair = Authority.new(tmp_path / "ca").pair("front", "localhost", "127.0.0.1")
    async with http_gateway(HYBRID, max_connections=3, tls=pair) as gateway:
        silent = [await gateway.connect() for _ in range(3)]
        await until(lambda: gateway.server.num_handshakes == 3, timeout_s=20)
        over_the_limit = await gateway.connect()
        assert await over_the_limit.read_until_closed() == b""
        await silent[0].close()
        await until(lambda: gateway.server.num_handshakes == 2, timeout_s=20)
        trusted = ssl.create_default_context(cafile=str(tmp_path / "ca" / "ca.pem"))
        origin = f"https://127.0.0.1:{gateway.port}"
        async with httpx.AsyncClient(base_url=origin, verify=trusted, timeout=60) as client:
            assert (await client.get("/health")).status_code == 200


async def test_tls_handshake_ends_after_its_time(tmp_path: Path) -> None:
    pair = Authority.new(tmp_path / "ca").pair("front", "localhost", "127.0.0.1")
    sock = listen("127.0.0.1", 0, flag="--http-port")
    acceptor = TlsAcceptor(
        sock,
        pair.context(),
        asyncio.Protocol,
        max_connections=8,
        num_open=lambda: 0,
        on_refused=lambda failure: None,
        handshake_s=0.05,
    )
    acceptor.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
    async with asyncio.timeout(20):
        assert await is_closed(reader)
    await until(lambda: acceptor.num_handshakes == 0, timeout_s=20)
    writer.close()
    acceptor.close()
    await acceptor.wait_closed()
    sock.close()


async def test_unfinished_heads_share_a_budget_and_the_largest_gives_way() -> None:
    async with http_gateway(HYBRID, memory_limits={Account.HEADS: 70_000}) as gateway:
        budget = gateway.cluster.gateway.budget
        large, small = await gateway.connect(), await gateway.connect()
        await large.send(UNFINISHED + b"x" * 50_000)
        await until(lambda: budget.used(Account.HEADS) > 50_000, timeout_s=20)
        await small.send(UNFINISHED + b"x" * 30_000)
        refused = await large.read_until_closed()
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"memory_budget" in refused
        await small.send(b"\r\n\r\n")
        assert (await small.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert budget.used(Account.HEADS) == 0


QUEUED = {
    "short requests": b"GET / HTTP/1.1\r\n\r\n" * 10_000,
    "many headers": (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * sized(1_000, 2_000) + b"\r\n") * 8,
    "bodies": request_bytes("/v1/completions", b" " * 30_000) * 10,
}
NUM_CONNECTIONS = sized(4, 10)
RUNNING = request_bytes("/v1/completions", b'{"prompt": "x", "max_tokens": 2}')


@pytest.mark.parametrize("queued", QUEUED.values(), ids=QUEUED)
async def test_memory_of_requests_that_wait_for_an_earlier_response_is_counted(queued: bytes) -> None:
    async with http_gateway(HYBRID) as gateway:
        budget, worker = gateway.cluster.gateway.budget, gateway.cluster.scheduler.workers[0]
        worker.prefill_s = 1e6
        connections = [await gateway.connect() for _ in range(NUM_CONNECTIONS)]
        for connection in connections:
            await connection.send(RUNNING)
        await until(lambda: len(worker.jobs) == NUM_CONNECTIONS, timeout_s=20)
        assert budget.used(Account.HEADS) == 0
        tracemalloc.start()
        try:
            for connection in connections:
                connection.writer.write(memoryview(queued))
            await until(lambda: all(each.pipeline for each in gateway.server.connections), timeout_s=60)
            by_file = {
                each.traceback[0].filename: each.size for each in tracemalloc.take_snapshot().statistics("filename")
            }
        finally:
            tracemalloc.stop()
        held_bytes = sum(size for file, size in by_file.items() if "/asyncio/" not in file and "/tests/" not in file)
        assert 0.9 * held_bytes < budget.used(Account.HEADS)
        for connection in connections:
            await connection.close()


async def test_connection_with_the_most_waiting_requests_gives_way_during_a_response() -> None:
    async with http_gateway(HYBRID, memory_limits={Account.HEADS: 200_000}) as gateway:
        budget, worker = gateway.cluster.gateway.budget, gateway.cluster.scheduler.workers[0]
        worker.is_paused = True
        large, small = await gateway.connect(), await gateway.connect()
        await large.send(RUNNING + GET_HEALTH * 60)
        await until(lambda: budget.used(Account.HEADS) > 100_000, timeout_s=20)
        await small.send(RUNNING + GET_HEALTH * 40)
        assert await large.read_until_closed() == b""  # an error would look like the response to its first request
        worker.is_paused = False
        assert (await small.read_until(b'"ok"')).startswith(b"HTTP/1.1 200 ")
        await until(lambda: not budget.used(Account.HEADS), timeout_s=20)


async def test_grpc_calls_that_wait_for_their_turn_share_a_budget() -> None:
    async with (
        served(limits={Account.UNREAD_CALLS: 3 * UNREAD_WINDOW_BYTES}) as (port, failures, c),
        asyncio.timeout(60),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"Bearer right") for stream in (1, 3, 5, 7)))
        kind, payload = 0, b""
        while kind != HEADERS:
            kind, _, payload = await read_frame(reader)
        assert b"memory_budget" in payload
        assert [failure.message for failure in failures] == [
            "the waiting call needs 65,536 bytes; 0 of 196,608 bytes for unread_calls are free; retry later"
        ]
        writer.close()
        await until(lambda: not c.gateway.budget.used(Account.UNREAD_CALLS), timeout_s=20)


async def grpc_connection(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HTTP2_START)
    return reader, writer


async def test_grpc_connection_over_the_limit_is_closed_and_idle_ones_end() -> None:
    server = GrpcServer(heartbeat_s=60.0, max_connections=2, idle_s=1.0)
    port = await server.start("127.0.0.1", 0)
    async with asyncio.timeout(60):
        first, second = await grpc_connection(port), await grpc_connection(port)
        for reader, _ in (first, second):
            await read_frame(reader)
        refused, _ = await grpc_connection(port)
        assert await is_closed(refused)
        for reader, _ in (first, second):  # without calls
            assert await is_closed(reader)
        await until_accepted(port)
    await server.stop(0.0)


async def until_accepted(port: int) -> None:
    """Connect until the server accepts. It counts an ended connection a little longer than its client."""
    while True:
        reader, _ = await grpc_connection(port)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await read_frame(reader)
            return


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Read until the other end closes the connection."""
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        pass
    return True
