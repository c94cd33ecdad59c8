"""Slow clients are closed at the receive deadline (F-41), and paused ones keep their connection."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress

import psutil
import pytest

from tests.integration.gateway.gateway_process import TIMES, GatewayProcess, gateway_process, valid_body
from tests.integration.gateway.http_gateway import request_bytes
from tests.integration.gateway.test_bounded_grpc import read_frame
from tests.malformed_connections import GOAWAY, HTTP2_START, SETTINGS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_CLIENTS = 300
MAX_ROUNDS = 5
DEADLINE_S = 3.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
"""An incomplete head: the empty line at its end is missing."""


async def send_slowly(port: int, data: bytes) -> tuple[bytes, float]:
    """Send the data, then one byte per second, until the other side closes.

    Returns the received bytes and the seconds until the close.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)

    async def send() -> None:
        while True:
            await asyncio.sleep(1.0)
            writer.write(b"x")

    sending = asyncio.create_task(send())
    received = b""
    try:
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                while data := await reader.read(65536):
                    received += data
    finally:
        sending.cancel()
        await asyncio.wait((sending,))
        writer.transport.abort()
    return received, loop.time() - began_s


def incomplete_requests() -> list[bytes]:
    """Return incomplete requests: half end within the head, half within the body."""
    body = request_bytes("/v1/completions", json.dumps(valid_body()).encode())
    return [(HEAD if number % 2 else body[:-20]) for number in range(NUM_CLIENTS)]


@pytest.mark.fault("F-41")
async def test_slow_clients_are_closed_at_the_deadline_and_others_are_answered() -> None:
    async with gateway_process(receive_deadline_s=DEADLINE_S) as gateway:
        await gateway.check()
        for _ in range(MAX_ROUNDS):
            before = await gateway.requests()
            clients = [asyncio.create_task(send_slowly(gateway.http_port, data)) for data in incomplete_requests()]
            num_open, num_answered = await check_others(gateway, clients)
            answers = [await client for client in clients]
            if num_open >= NUM_CLIENTS:
                break  # otherwise the first were closed before the last had connected
        assert num_open >= NUM_CLIENTS, "all connections are open at the same time"
        assert num_answered > 0
        assert all(received.startswith(b"HTTP/1.1 408 ") for received, _ in answers)
        assert min(open_s for _, open_s in answers) > 0.9 * DEADLINE_S
        counted = await gateway.requests() - before
        assert (counted["", "408"], counted["completions", "408"]) == (NUM_CLIENTS // 2, NUM_CLIENTS // 2)


async def check_others(gateway: GatewayProcess, clients: Sequence[asyncio.Task[object]]) -> tuple[int, int]:
    """Send valid requests until all clients have ended.

    Returns the largest number of open connections, and the number of answers.
    """
    num_open = num_answered = 0
    while not all(client.done() for client in clients):
        await gateway.check()
        num_answered += 1
        if num_open < NUM_CLIENTS:
            num_open = max(num_open, num_connections(gateway))
        await asyncio.sleep(0.05)
    return num_open, num_answered


def num_connections(gateway: GatewayProcess) -> int:
    connections = psutil.Process(gateway.pid).net_connections("tcp")
    return sum(
        connection.laddr.port == gateway.http_port and connection.status != psutil.CONN_LISTEN
        for connection in connections
    )


async def test_grpc_client_that_answers_no_ping_for_some_heartbeats_keeps_its_connection() -> None:
    async with gateway_process() as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.grpc_port)
        writer.write(HTTP2_START)
        kind, _, _ = await read_frame(reader)
        assert kind == SETTINGS
        with suppress(TimeoutError):
            async with asyncio.timeout(6 * TIMES["heartbeat_s"]):
                while kind != GOAWAY:
                    kind, _, _ = await read_frame(reader)
        assert kind != GOAWAY
        writer.close()
