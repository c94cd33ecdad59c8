"""Limits and shutdown of a gateway: clients that do not read, exhausted file descriptors, SIGTERM."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.channel import channel_options, open_channel
from baton.rpc.mappers.client_mapper import to_generate_request
from baton.runtime.config.settings import GatewayConfig
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.cluster import GatewayAddresses, ProcessCluster, process_cluster
from tests.emulated_answer import emulated_answer
from tests.integration.gateway.http_gateway import request_bytes
from tests.malformed_connections import (
    ACK,
    HTTP2_START,
    PING,
    SETTINGS,
    frame,
    grpc_call,
    grpc_message,
    internal_errors,
)
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

VOCAB_SIZE, SEED = 4096, 7
STEP_MS = 10
LONG = 600
"""Number of tokens of an answer that takes six seconds on any machine."""
COMPLETIONS = "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    async with process_cluster(
        prefill=1,
        decode=1,
        device="emulated",
        emulated_costs=f"step={STEP_MS}ms,prefill_token=20us",
        transfer="local",
        kv_memory=256 * 2**20,
        **LONG_TIMES | {"drain_s": 60.0, "receive_deadline_s": 10.0},
    ) as running:
        yield running


def prompt_of(number: int) -> list[int]:
    rng = Random(number)
    return [rng.randrange(4, VOCAB_SIZE) for _ in range(40)]


def body_of(number: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt_of(number),
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": SEED,
        "ignore_eos": True,
    } | more


def expected_tokens(number: int, max_tokens: int) -> list[int]:
    return emulated_answer(prompt_of(number), seed=SEED, max_tokens=max_tokens, vocab_size=VOCAB_SIZE)


def open_grpc(addresses: GatewayAddresses) -> grpc.aio.Channel:
    return open_channel(addresses.grpc_address, channel_options(10.0))  # a busy machine breaks no stream


class Stream:
    """A streamed answer over HTTP or gRPC, read by a background task."""

    def __init__(self, addresses: GatewayAddresses, number: int, *, over: str) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.has_begun = asyncio.Event()
        self.task = asyncio.create_task((self._over_http if over == "http" else self._over_grpc)(addresses))

    async def _over_http(self, addresses: GatewayAddresses) -> None:
        body = body_of(self.number, LONG, stream=True, return_token_ids=True)
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{addresses.url}{COMPLETIONS}", json=body) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
            assert line == "" or line == "data: [DONE]"

    async def _over_grpc(self, addresses: GatewayAddresses) -> None:
        async with open_grpc(addresses) as channel:
            message = to_generate_request(body_of(self.number, LONG))
            async for chunk in inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=60):
                for choice in chunk.choices:
                    self._take(choice.token_ids)

    def _take(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.has_begun.set()

    async def check(self) -> None:
        """Wait for the end and check all tokens."""
        await self.task
        assert self.tokens == expected_tokens(self.number, LONG)


async def streams(addresses: GatewayAddresses) -> list[Stream]:
    """Start four streams, two over each protocol, and wait for their first tokens."""
    running = [Stream(addresses, number, over="http" if number % 2 else "grpc") for number in range(4)]
    async with asyncio.timeout(30):
        await asyncio.gather(*(stream.has_begun.wait() for stream in running))
    return running


def log_of(cluster: ProcessCluster, name: str) -> list[str]:
    return [
        line for file in (cluster.directory / "logs" / name).glob("*.log") for line in file.read_text().splitlines()
    ]


async def answers(addresses: GatewayAddresses, number: int) -> bool:
    """Return True if a request over a new HTTP connection is answered within two seconds."""
    with suppress(httpx.TransportError):
        async with httpx.AsyncClient(timeout=2) as client:
            answer = await client.post(f"{addresses.url}{COMPLETIONS}", json=body_of(number, 4, return_token_ids=True))
            return bool(answer.json()["choices"][0]["token_ids"] == expected_tokens(number, 4))
    return False


async def answers_grpc(addresses: GatewayAddresses) -> bool:
    """Return True if a call over a new gRPC connection is answered within two seconds."""
    with suppress(grpc.aio.AioRpcError):
        async with open_grpc(addresses) as channel:
            return bool(
                (
                    await inference_pb2_grpc.InferenceStub(channel).ListModels(
                        inference_pb2.ListModelsRequest(), timeout=2
                    )
                ).models
            )
    return False


@pytest.mark.fault("F-49")
async def test_draining_gateway_finishes_its_streams_and_refuses_new_requests(cluster: ProcessCluster) -> None:
    addresses = await cluster.start_gateway("g1")
    running = await streams(addresses)
    async with (
        httpx.AsyncClient(base_url=addresses.url, timeout=20) as client,
        open_grpc(addresses) as channel,
    ):
        assert (await client.get("/ready")).status_code == 200
        cluster.signal("g1", signal.SIGTERM)
        async with asyncio.timeout(20):
            while (ready := await client.get("/ready")).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["draining"])
        assert (await client.get("/health")).status_code == 200
        for number in (90, 91):  # over the open connection, and over a new one after its `connection: close`
            refused = await client.post(COMPLETIONS, json=body_of(number, 4))
            assert (refused.status_code, refused.json()["error"]["code"], refused.headers["connection"]) == (
                503,
                "draining",
                "close",
            )
            assert "retry-after" in refused.headers
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(prompt="x"), timeout=20)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert not any(stream.task.done() for stream in running), "streams continue while new requests are refused"
        for stream in running:
            await stream.check()
    assert await cluster.until_ended("g1") == 0
    assert internal_errors(log_of(cluster, "g1")) == []
    await cluster.check_clean()


NUM_IDLE = 270
MAX_OPEN_FILES = 256


async def idle_connections(address: str) -> list[socket.socket]:
    """Open more connections than the gateway has file descriptors, and send nothing."""
    host, port = address.rsplit(":", 1)
    sockets = []
    for _ in range(NUM_IDLE):
        sock = socket.socket()
        sock.setblocking(False)
        with suppress(BlockingIOError, OSError):
            sock.connect((host, int(port)))
        sockets.append(sock)
    return sockets


@pytest.mark.fault("F-44")
@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.long)])
async def test_streams_continue_without_free_file_descriptors_and_new_clients_connect_later(
    cluster: ProcessCluster, protocol: str
) -> None:
    """Idle clients hold all file descriptors until the gateway closes their connections at the receive
    deadline."""
    name = f"g-{protocol}"
    addresses = await cluster.start_gateway(name, max_open_files=MAX_OPEN_FILES, receive_deadline_s=5.0)
    running = await streams(addresses)
    process = psutil.Process(cluster.pid(name))
    idle = await idle_connections(
        addresses.url.removeprefix("http://") if protocol == "http" else addresses.grpc_address
    )
    try:
        async with asyncio.timeout(20):
            while process.num_fds() < MAX_OPEN_FILES - 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not any(stream.task.done() for stream in running), "streams continue while no connection can be opened"
        for stream in running:
            await stream.check()
        async with asyncio.timeout(60):
            while process.num_fds() > MAX_OPEN_FILES - NUM_IDLE // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            while not (await answers(addresses, 44) and await answers_grpc(addresses)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        for sock in idle:
            sock.close()
    assert await cluster.stop_one(name) == 0
    assert internal_errors(log_of(cluster, name)) == []
    await cluster.check_clean()


NUM_SAMPLES = 32


async def not_read_over_http(addresses: GatewayAddresses) -> asyncio.StreamWriter:
    """Request a long stream over HTTP and read nothing of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", int(addresses.url.rsplit(":", 1)[1])))
    _, writer = await asyncio.open_connection(sock=sock, limit=1024)
    body = body_of(42, 3000, n=NUM_SAMPLES, stream=True, return_token_ids=True, logprobs=1)
    writer.write(request_bytes(COMPLETIONS, json.dumps(body).encode()))
    return writer


async def not_read_over_grpc(addresses: GatewayAddresses) -> None:
    """Request a long stream over gRPC and never extend its HTTP/2 flow-control window.

    The client answers pings, so that it counts as alive. Returns when the connection ends.
    """
    reader, writer = await asyncio.open_connection(*addresses.grpc_address.split(":"))
    message = to_generate_request(body_of(43, 3000, n=NUM_SAMPLES, logprobs=1))
    writer.write(HTTP2_START + grpc_call("/baton.v1.Inference/Generate", grpc_message(message.SerializeToString())))
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] in (PING, SETTINGS) and not head[4] & ACK:
                writer.write(frame(head[3], payload if head[3] == PING else b"", flags=ACK))


async def lost_readers(addresses: GatewayAddresses) -> dict[str, int]:
    """Return the number of requests that ended with reason `slow_reader`, by endpoint."""
    async with httpx.AsyncClient(timeout=20) as client:
        lines = (await client.get(f"{addresses.url}/metrics")).text.splitlines()
    counts = (line for line in lines if line.startswith("baton_requests_total") and 'reason="slow_reader"' in line)
    return {line.split('endpoint="')[1].split('"')[0]: round(float(line.rsplit(" ", 1)[1])) for line in counts}


@pytest.mark.long  # `make test` covers this by test_http_limits.py and test_inference_service.py, in one process
@pytest.mark.fault("F-42")
async def test_client_that_does_not_read_loses_its_request_and_others_are_unaffected(
    cluster: ProcessCluster,
) -> None:
    """With the default buffer size of a gateway."""
    assert GatewayConfig().stream_buffer_bytes <= 256 * 1024
    addresses = GatewayAddresses(url=cluster.url, grpc_address=cluster.grpc_address)
    others = [Stream(addresses, number, over="http" if number % 2 else "grpc") for number in range(4)]
    unread = await not_read_over_http(addresses)
    stalled = asyncio.create_task(not_read_over_grpc(addresses))
    async with asyncio.timeout(100):
        while (await lost_readers(addresses)).keys() != {"completions", "grpc"}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert await lost_readers(addresses) == {"completions": 1, "grpc": 1}
    for stream in others:
        await stream.check()
    await cluster.check_clean()
    unread.transport.abort()
    stalled.cancel()
    await asyncio.wait((stalled,))
