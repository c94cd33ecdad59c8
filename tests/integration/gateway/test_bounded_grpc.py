"""gRPC calls are checked before their message is read, and few messages are read at a time."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import grpc
import pytest

from baton.core.errors import Code, Failure, Reason, Refused
from baton.gateway.grpc.inference_service import InferenceService
from baton.rpc.channel import UNREAD_WINDOW_BYTES, channel_options, open_channel
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.receive_gate import ReceiveGate
from baton.runtime.process.byte_budget import Account, ByteBudget
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.malformed_connections import (
    DATA,
    END_HEADERS,
    HEADERS,
    HTTP2_START,
    SETTINGS,
    field_block,
    frame,
    grpc_message,
    request_head,
)
from tests.probes.unfinished_messages import UnfinishedMessages
from tests.unit.gateway.fakes import Cluster, cluster
from tests.unit.rpc.client_api_stubs import StubGenerateStream, StubInference

pytestmark = pytest.mark.integration
GENERATE = "/baton.v1.Inference/Generate"
MESSAGE_BYTES = 7 * 2**20
MAX_CONCURRENT_STREAMS = 3
"""Id of the HTTP/2 setting."""


def check(authorization: str) -> None:
    if authorization != "Bearer right":
        failure = Failure(code=Code.UNAUTHENTICATED, reason=Reason.INVALID_API_KEY, message="the API key is wrong")
        raise Refused(failure)


@asynccontextmanager
async def served(
    *,
    receive_s: float = 5.0,
    max_message_bytes: int = 2 * MESSAGE_BYTES,
    limits: Mapping[Account, int] = MappingProxyType({}),
) -> AsyncIterator[tuple[int, list[Failure], Cluster]]:
    """Serve the inference API behind a gate that receives two messages at a time.

    Yields (port, refused calls, cluster).
    """
    refused: list[Failure] = []
    async with cluster(("h0", "hybrid"), memory_limits={Account.RECEIVING: 2 * max_message_bytes, **limits}) as c:
        gate = ReceiveGate(
            check,
            budget=c.gateway.budget,
            max_message_bytes=max_message_bytes,
            receive_s=receive_s,
            on_refused=refused.append,
        )
        server = GrpcServer(heartbeat_s=1.0, max_message_bytes=2 * MESSAGE_BYTES, gate=gate, max_streams=7)
        server.add_inference(InferenceService(c.gateway))
        port = await server.start("127.0.0.1", 0)
        try:
            yield port, refused, c
        finally:
            await server.stop(0.0)


def unfinished_call(stream: int, authorization: bytes) -> bytes:
    """Return the frames of a call whose message of 7 MiB has only begun."""
    head = field_block(request_head(GENERATE, authorization=authorization))
    begin = grpc_message(b"x" * 1000, length=MESSAGE_BYTES)
    return frame(HEADERS, head, flags=END_HEADERS, stream=stream) + frame(DATA, begin, stream=stream)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """Return (kind, stream, payload) of the next frame."""
    head = await reader.readexactly(9)
    payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
    return head[3], int.from_bytes(head[5:9], "big"), payload


async def ended_streams(reader: asyncio.StreamReader, number: int) -> dict[int, bytes]:
    """Return the last header block of the first `number` streams that end."""
    ended: dict[int, bytes] = {}
    while len(ended) < number:
        kind, stream, payload = await read_frame(reader)
        if kind == HEADERS:
            ended[stream] = payload
    return ended


async def test_call_without_a_key_is_refused_before_its_message_is_received() -> None:
    async with served() as (port, refused, _), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"Bearer wrong") for stream in (1, 3, 5)))
        ended = await ended_streams(reader, 3)
        assert all(b"invalid_api_key" in block for block in ended.values())
        assert [failure.reason for failure in refused] == [Reason.INVALID_API_KEY] * 3
        writer.close()


async def test_call_whose_message_does_not_arrive_in_time_is_refused() -> None:
    async with served(receive_s=0.3) as (port, refused, _), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + unfinished_call(1, b"Bearer right"))
        assert b"deadline" in (await ended_streams(reader, 1))[1]
        assert [failure.code for failure in refused] == [Code.RECEIVE_TIMEOUT]
        writer.close()


async def test_calls_wait_while_the_allowed_number_of_messages_is_received() -> None:
    async with served(receive_s=1.0) as (port, _, _), asyncio.timeout(20):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"Bearer right") for stream in (1, 3)))
        await asyncio.sleep(0.2)
        channel = open_channel(f"127.0.0.1:{port}", channel_options(5.0))
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(model="demo", prompt="hello", max_tokens=3)
        waiting = stub.Generate(request, metadata=(("authorization", "Bearer right"),), timeout=10)
        assert await waiting.code() in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED)
        served_again = stub.Generate(request, metadata=(("authorization", "Bearer right"),), timeout=10)
        assert [response async for response in served_again]
        await channel.close()
        writer.close()


async def test_calls_that_wait_for_their_turn_can_send_only_little() -> None:
    async with served(receive_s=30.0) as (port, _, _):
        await probe_calls(port, 1)  # one message at the full speed of the connection
        sent_bytes = await probe_calls(port, 7)
        assert 2 * MESSAGE_BYTES - 7 < sent_bytes < 2 * MESSAGE_BYTES + 5 * 2 * UNREAD_WINDOW_BYTES


async def probe_calls(port: int, number: int) -> int:
    return await UnfinishedMessages.run("127.0.0.1", port, number, 3.0, authorization=b"Bearer right")


async def test_limit_of_streams_is_announced() -> None:
    async with served() as (port, _, _), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START)
        kind, _, payload = await read_frame(reader)
        assert kind == SETTINGS
        settings = {
            int.from_bytes(payload[at : at + 2], "big"): int.from_bytes(payload[at + 2 : at + 6], "big")
            for at in range(0, len(payload), 6)
        }
        assert settings[MAX_CONCURRENT_STREAMS] == 7
        writer.close()


async def test_call_is_refused_if_there_is_no_memory_for_its_message() -> None:
    async with served() as (port, refused, c), asyncio.timeout(10):
        c.gateway.budget.reserve(Account.RECEIVING, MESSAGE_BYTES, "bodies")  # leaves place for one message
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"Bearer right") for stream in (1, 3)))
        ended = await ended_streams(reader, 1)
        assert b"memory_budget" in next(iter(ended.values()))
        assert [failure.reason for failure in refused] == [Reason.MEMORY_BUDGET]
        writer.close()


async def test_message_stays_in_the_budget_until_its_call_has_begun() -> None:
    budget = ByteBudget({Account.RECEIVING: 4 * MESSAGE_BYTES, Account.UNREAD_CALLS: MESSAGE_BYTES})
    seen: list[tuple[int, Mapping[str, object]]] = []
    stream = StubGenerateStream()

    class Api(StubInference):
        async def generate(self, body: Mapping[str, object], caller: object) -> StubGenerateStream:
            seen.append((budget.used(Account.RECEIVING), body))
            return stream

    gate = ReceiveGate(check, budget=budget, max_message_bytes=MESSAGE_BYTES, receive_s=5.0)
    server = GrpcServer(heartbeat_s=1.0, gate=gate)
    server.add_inference(Api())
    port = await server.start("127.0.0.1", 0)
    async with asyncio.timeout(20), open_channel(f"127.0.0.1:{port}", channel_options(5.0)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        prompt = "x" * 2**20
        running = stub.Generate(
            inference_pb2.GenerateRequest(prompt=prompt), metadata=(("authorization", "Bearer right"),)
        )
        await running.initial_metadata()
        ((used_bytes, body),) = seen
        assert len(prompt) < used_bytes < 1.1 * len(prompt)
        assert (budget.used(Account.RECEIVING), budget.used(Account.UNREAD_CALLS)) == (0, 0)
        assert not body  # the frames of the running call keep it, so it must be empty
        running.cancel()
    await server.stop(0.0)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xff" * 10, "Error parsing message"),
        (inference_pb2.GenerateRequest(stop=["a"] * 17).SerializeToString(), "stop has 17 items"),
    ],
    ids=["malformed", "not convertible"],
)
async def test_message_that_cannot_be_converted_is_refused_and_counted(raw: bytes, words: str) -> None:
    async with served() as (port, refused, c), asyncio.timeout(20):
        channel = open_channel(f"127.0.0.1:{port}", channel_options(5.0))
        running = channel.unary_stream(GENERATE)(raw, metadata=(("authorization", "Bearer right"),))
        assert await running.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in await running.details()
        assert [failure.reason for failure in refused] == [Reason.INVALID_REQUEST]
        assert c.gateway.budget.used(Account.RECEIVING) == 0
        await channel.close()
