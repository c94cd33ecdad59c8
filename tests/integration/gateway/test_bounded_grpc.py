"""gRPC calls are checked before their message is read, and few messages are read at a time."""

import asyncio
import gc
import tracemalloc
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.core.errors import Code, Reason
from baton.rpc.channel import UNREAD_WINDOW_BYTES, channel_options, open_channel
from baton.rpc.gates import receive_gate
from baton.rpc.gates.keyless_gate import CALLS_PER_CONNECTION, READS, KeylessGate
from baton.rpc.gates.receive_gate import CALL_BYTES, ReceiveGate
from baton.rpc.grpc_server import GrpcServer
from baton.runtime.process.byte_budget import Account, ByteBudget
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.gateway.gated_server import MESSAGE_BYTES, check, served
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
from tests.unit.gateway.fakes import until
from tests.unit.rpc.client_api_stubs import StubGenerateStream, StubInference

pytestmark = pytest.mark.integration
PACKAGE = "/baton.v1.Inference/"
GENERATE = PACKAGE + "Generate"
CHECK = "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MAX_CONCURRENT_STREAMS = 3


def unfinished_call(stream: int, authorization: bytes, method: str = GENERATE) -> bytes:
    """Return the frames of a call whose message of 7 MiB has only begun."""
    head = field_block(request_head(method, authorization=authorization))
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
    async with served() as (port, refused, _), asyncio.timeout(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"Bearer wrong") for stream in (1, 3, 5)))
        ended = await ended_streams(reader, 3)
        assert all(b"invalid_api_key" in block for block in ended.values())
        assert [failure.reason for failure in refused] == [Reason.INVALID_API_KEY] * 3
        writer.close()


async def test_call_whose_message_does_not_arrive_in_time_is_refused() -> None:
    async with served(receive_s=0.3) as (port, refused, _), asyncio.timeout(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + unfinished_call(1, b"Bearer right"))
        assert b"deadline" in (await ended_streams(reader, 1))[1]
        assert [failure.code for failure in refused] == [Code.RECEIVE_TIMEOUT]
        writer.close()


async def test_calls_wait_while_the_allowed_number_of_messages_is_received() -> None:
    async with served(receive_s=60.0) as (port, _, c), asyncio.timeout(50):
        budget = c.gateway.budget
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"Bearer right") for stream in (1, 3)))
        await until(lambda: budget.used(Account.RECEIVING) == budget.limits[Account.RECEIVING])
        channel = open_channel(f"127.0.0.1:{port}", channel_options(60.0))
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(model="demo", prompt="hello", max_tokens=3)
        waiting = stub.Generate(request, metadata=(("authorization", "Bearer right"),))
        await until(lambda: budget.used(Account.UNREAD_CALLS) == 3 * UNREAD_WINDOW_BYTES)
        assert not waiting.done()
        writer.close()
        assert [response async for response in waiting]
        await channel.close()


async def test_calls_that_send_no_message_in_time_make_place_for_others() -> None:
    async with served(receive_s=0.5) as (port, refused, _), asyncio.timeout(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"Bearer right") for stream in (1, 3)))
        await ended_streams(reader, 2)
        assert [failure.code for failure in refused] == [Code.RECEIVE_TIMEOUT] * 2
        channel = open_channel(f"127.0.0.1:{port}", channel_options(60.0))
        tokenize, code = inference_pb2_grpc.InferenceStub(channel).Tokenize, grpc.StatusCode.DEADLINE_EXCEEDED
        while code is grpc.StatusCode.DEADLINE_EXCEEDED:  # on a busy machine its message may also be late
            request = inference_pb2.TokenizeRequest(prompt="hello")
            code = await tokenize(request, metadata=(("authorization", "Bearer right"),)).code()
        assert code is grpc.StatusCode.OK
        await channel.close()
        writer.close()


async def test_calls_that_wait_for_their_turn_can_send_only_little() -> None:
    async with served(receive_s=30.0) as (port, _, _):
        await probe_calls(port, 1, MESSAGE_BYTES - 1)  # one message at the full speed of the connection
        sent_bytes = await probe_calls(port, 7, 2 * MESSAGE_BYTES - 2)
        assert 2 * MESSAGE_BYTES - 7 < sent_bytes < 2 * MESSAGE_BYTES + 5 * 2 * UNREAD_WINDOW_BYTES


async def probe_calls(port: int, number: int, at_least: int) -> int:
    """Send until `at_least` bytes were sent and two more seconds have passed."""
    key = b"Bearer right"
    return await UnfinishedMessages.run("127.0.0.1", port, number, 2.0, at_least=at_least, authorization=key)


async def test_limit_of_streams_is_announced() -> None:
    async with served() as (port, _, _), asyncio.timeout(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START)
        kind, _, payload = await read_frame(reader)
        assert kind == SETTINGS
        settings = {
            int.from_bytes(payload[at : at + 2], "big"): int.from_bytes(payload[at + 2 : at + 6], "big")
            for at in range(0, len(payload), 6)
        }
        assert settings[MAX_CONCURRENT_STREAMS] == 20
        writer.close()


async def test_call_is_refused_if_there_is_no_memory_for_its_message() -> None:
    async with served() as (port, refused, c), asyncio.timeout(50):
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

    gate = ReceiveGate(check, budget=budget, max_message_bytes=MESSAGE_BYTES, receive_s=30.0)
    server = GrpcServer(heartbeat_s=60.0, gates=(gate, KeylessGate(budget)))
    server.add_inference(Api())
    port = await server.start("127.0.0.1", 0)
    async with asyncio.timeout(50), open_channel(f"127.0.0.1:{port}", channel_options(60.0)) as channel:
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
    async with served() as (port, refused, c), asyncio.timeout(50):
        channel = open_channel(f"127.0.0.1:{port}", channel_options(60.0))
        running = channel.unary_stream(GENERATE)(raw, metadata=(("authorization", "Bearer right"),))
        assert await running.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in await running.details()
        assert [failure.reason for failure in refused] == [Reason.INVALID_REQUEST]
        assert c.gateway.budget.used(Account.RECEIVING) == 0
        await channel.close()


# Services without a key: health checks


async def test_health_checks_that_send_long_messages_take_the_memory_of_few() -> None:
    num_connections = 2 * READS
    together = asyncio.Barrier(num_connections)  # a connection that ends makes room for the message of another one
    async with served(wait_s=60.0, read_s=60.0) as (port, _, _):
        run = partial(UnfinishedMessages.run, "127.0.0.1", port, CALLS_PER_CONNECTION, 2.0, CHECK)
        probe = partial(run, together=together)
        sent_bytes = sum(await asyncio.gather(*(probe() for _ in range(num_connections))))
        waiting_bytes = num_connections * CALLS_PER_CONNECTION * 2 * UNREAD_WINDOW_BYTES
        assert READS * UNREAD_WINDOW_BYTES < sent_bytes < READS * MESSAGE_BYTES + waiting_bytes


async def test_silent_calls_of_many_connections_do_not_keep_out_a_health_check() -> None:
    """Connections take turns, so the calls of one that waits are behind those of the others once."""
    async with served(read_s=0.1) as (port, _, c), asyncio.timeout(50):
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(3 * READS)]
        for writer in writers:
            streams = range(1, 2 * CALLS_PER_CONNECTION, 2)
            writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"", CHECK) for stream in streams))
        await until(lambda: c.gateway.budget.used(Account.KEYLESS_CALLS) > 20 * UNREAD_WINDOW_BYTES)
        async with open_channel(f"127.0.0.1:{port}", channel_options(60.0)) as channel:
            stub, code = health_pb2_grpc.HealthStub(channel), grpc.StatusCode.DEADLINE_EXCEEDED
            while code is grpc.StatusCode.DEADLINE_EXCEEDED:  # on a busy machine its message may also be late
                code = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20).code()
            assert code is grpc.StatusCode.OK
        await until(lambda: c.gateway.budget.used(Account.KEYLESS_CALLS) == 0)
        for writer in writers:
            writer.close()


async def test_health_check_whose_message_does_not_arrive_is_refused() -> None:
    # The second call stops waiting long before the first one's time is over, even if it begins late.
    async with served(wait_s=0.2, read_s=2.0) as (port, _, c), asyncio.timeout(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"", CHECK) for stream in (1, 3)))
        ended = await ended_streams(reader, 2)
        assert b"deadline" in ended[1]
        assert b"queue_full" in ended[3]
        assert c.gateway.budget.used(Account.KEYLESS_CALLS) == 0
        writer.close()


async def test_oldest_watch_gives_way_when_the_account_is_full() -> None:
    limits = {Account.KEYLESS_CALLS: 2 * (CALL_BYTES + UNREAD_WINDOW_BYTES)}
    async with served(limits=limits) as (port, _, _), asyncio.timeout(50):
        channels = [open_channel(f"127.0.0.1:{port}", channel_options(60.0)) for _ in range(6)]
        watches = []
        for channel in (*channels, channels[0]):
            watches.append(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
            assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await watches[0].code() is not grpc.StatusCode.OK
        for channel in channels:
            await channel.close()


async def test_a_connection_has_few_health_checks_at_a_time() -> None:
    async with served() as (port, _, c), asyncio.timeout(50):
        channel = open_channel(f"127.0.0.1:{port}", channel_options(60.0))
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(CALLS_PER_CONNECTION)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert c.gateway.budget.used(Account.KEYLESS_CALLS) == CALLS_PER_CONNECTION * CALL_BYTES
        assert await stub.Check(health_pb2.HealthCheckRequest()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches[0].cancel()
        while await stub.Check(health_pb2.HealthCheckRequest()).code() is not grpc.StatusCode.OK:
            pass
        await channel.close()


# Reflection


async def test_reflection_needs_a_key_before_its_messages_are_received() -> None:
    async with served() as (port, refused, _), asyncio.timeout(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HTTP2_START + b"".join(unfinished_call(stream, b"", REFLECT) for stream in (1, 3)))
        ended = await ended_streams(reader, 2)
        assert all(b"invalid_api_key" in block for block in ended.values())
        assert [failure.reason for failure in refused] == [Reason.INVALID_API_KEY] * 2
        writer.close()


async def test_reflection_with_a_key_answers_each_message_until_the_client_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receive_gate, "NEXT_MESSAGE_S", 60.0)
    async with served() as (port, _, c), asyncio.timeout(50):
        budget = c.gateway.budget
        channel = open_channel(f"127.0.0.1:{port}", channel_options(60.0))
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(metadata=(("authorization", "Bearer right"),))
        for is_last in (False, True):
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            names = [each.name for each in (await call.read()).list_services_response.service]
            assert "baton.v1.Inference" in names
            if not is_last:
                await until(lambda: budget.used(Account.RECEIVING))  # it waits for the next message
                monkeypatch.setattr(receive_gate, "NEXT_MESSAGE_S", 0.3)  # applies to the one after that
        assert await call.code() is grpc.StatusCode.OK
        assert c.gateway.budget.used(Account.RECEIVING) == 0
        await channel.close()


LONG = b"x" * 4_000_000
LONG_TEXT = b"\x12\x80\x92\xf4\x01" + LONG
"""Field 2 as a text of 4,000,000 characters."""


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("baton.v1.Inference/ListModels", LONG_TEXT),  # an unknown field, which is ignored
        ("baton.v1.Inference/Tokenize", LONG_TEXT),
        ("baton.v1.Inference/Generate", LONG_TEXT),
        ("baton.v1.Inference/Generate", b"\n\x80\x80\x80," + LONG),
        ("baton.v1.Inference/Detokenize", b"\n\x80\x92\xf4\x01" + LONG),
        ("grpc.health.v1.Health/Check", b"\n\x80\x92\xf4\x01" + LONG),
        ("grpc.health.v1.Health/Check", b"\n\x80\x80\x80," + LONG),
    ],
    ids=["served", "long prompt", "too long", "malformed", "unknown model", "unknown service", "malformed check"],
)
async def test_message_of_an_ended_call_is_freed_without_a_garbage_collection(method: str, message: bytes) -> None:
    """Services collect rarely: a message in a cycle of references would stay for hundreds of calls."""
    async with served() as (port, _, _), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(f"/{method}")

        async def send() -> None:
            with suppress(grpc.aio.AioRpcError):
                async with asyncio.timeout(60.0):
                    async for _ in call(message, metadata=(("authorization", "Bearer right"),)):
                        pass

        await send()  # imports, and caches of grpc
        gc.disable()
        tracemalloc.start(1)
        try:
            for _ in range(4):
                await send()
            # a call ends at its server after it has ended at its client
            await until(lambda: tracemalloc.get_traced_memory()[0] < len(message), timeout_s=60.0)
        finally:
            tracemalloc.stop()
            gc.enable()
