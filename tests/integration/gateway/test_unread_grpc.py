"""The connection of a gRPC client that reads no response ends, and its memory is counted until then."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from baton.rpc import grpc_server
from baton.rpc.channel import UNREAD_WINDOW_BYTES, channel_options, open_channel
from baton.rpc.client_writer import ClientWriter
from baton.rpc.gates.receive_gate import CALL_BYTES
from baton.rpc.grpc_server import GrpcServer
from baton.runtime.observability.health import Health
from baton.runtime.process.byte_budget import Account
from baton.v1 import inference_pb2
from tests.integration.gateway.gated_server import served
from tests.malformed_connections import RST_STREAM, frame, grpc_call, grpc_message
from tests.probes.unread_responses import UnreadResponses
from tests.unit.gateway.fakes import until

pytestmark = pytest.mark.integration
PACKAGE = "/baton.v1.Inference/"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
CANCEL = 8
"""Error code of HTTP/2."""
MESSAGES = {
    CHECK: b"",
    WATCH: b"",
    PACKAGE + "ListModels": b"",
    REFLECT: reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString(),
    PACKAGE + "Tokenize": inference_pb2.TokenizeRequest(prompt="x" * 1000).SerializeToString(),
    PACKAGE + "Detokenize": inference_pb2.DetokenizeRequest(token_ids=[97] * 1000).SerializeToString(),
    PACKAGE + "Generate": inference_pb2.GenerateRequest(prompt="x", max_tokens=2).SerializeToString(),
}
MAX_TRIES = 5
COUNTED = {CHECK: Account.KEYLESS_CALLS, WATCH: Account.KEYLESS_CALLS, PACKAGE + "ListModels": Account.UNREAD_CALLS}
"""Account of calls whose response has a fixed size. The bytes of other responses are in UNSENT."""


def calls_of(method: str, number: int) -> bytes:
    content = grpc_message(MESSAGES[method])
    streams = range(1, 2 * number, 2)
    return b"".join(grpc_call(method, content, stream=each, authorization=b"Bearer right") for each in streams)


@pytest.mark.parametrize("method", MESSAGES)
async def test_unread_responses_are_counted_until_their_connection_ends(method: str) -> None:
    async with served(client_read_s=0.5) as (port, _, c), asyncio.timeout(50):
        budget, was_counted = c.gateway.budget, method == REFLECT
        for _ in range(MAX_TRIES):
            async with UnreadResponses.run("127.0.0.1", port, calls_of(method, 3)) as connection:
                while not (was_counted or connection.has_ended.is_set()):
                    await asyncio.sleep(0.005)
                    if method in COUNTED:
                        was_counted = budget.used(COUNTED[method]) == 3 * CALL_BYTES
                    else:
                        was_counted = budget.used(Account.UNSENT) > 0
                await connection.has_ended.wait()
            if was_counted:  # otherwise the connection ended before all its calls had begun
                break
        assert was_counted
        await until(lambda: not any(budget.used(account) for account in (*COUNTED.values(), Account.UNSENT)))


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize", "Generate"])
async def test_connection_of_a_response_that_is_cut_off_ends_at_once(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the account is full, the response with the most unread bytes makes room for others."""
    limits, calls = {Account.UNSENT: 100_000}, calls_of(PACKAGE + method, 1)
    has_begun = asyncio.Event()

    class NotedWriter(ClientWriter):
        async def write(self, context: Any, message: Any) -> None:
            has_begun.set()
            await super().write(context, message)

    monkeypatch.setattr(grpc_server, "ClientWriter", NotedWriter)
    async with (
        served(limits=limits) as (port, _, c),
        asyncio.timeout(50),
        UnreadResponses.run("127.0.0.1", port, calls) as connection,
        AsyncExitStack() as others,
    ):
        await until(lambda: c.gateway.budget.used(Account.UNSENT) > 0 and not c.gateway.num_open)
        await has_begun.wait()  # a message is being written
        unread_bytes = c.gateway.budget.used(Account.UNSENT)
        for _ in range(100_000 // (unread_bytes - 1)):
            others.enter_context(c.gateway.unsent_answer(unread_bytes - 1, lambda error: None))
        await connection.has_ended.wait()


async def test_unread_watch_that_gives_way_to_others_loses_its_connection() -> None:
    limits = {Account.KEYLESS_CALLS: CALL_BYTES + UNREAD_WINDOW_BYTES}
    async with (
        served(limits=limits) as (port, _, c),
        asyncio.timeout(50),
        UnreadResponses.run("127.0.0.1", port, calls_of(WATCH, 1)) as connection,
        open_channel(f"127.0.0.1:{port}", channel_options(60.0)) as channel,
    ):
        await until(lambda: c.gateway.budget.used(Account.KEYLESS_CALLS) == CALL_BYTES)
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        await connection.has_ended.wait()


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_call_that_its_client_cancels_does_not_end_its_connection(method: str) -> None:
    """Other calls of the connection go on."""
    reset = frame(RST_STREAM, CANCEL.to_bytes(4, "big"), stream=1)
    async with (
        served() as (port, _, c),
        asyncio.timeout(50),
        UnreadResponses.run("127.0.0.1", port, calls_of(PACKAGE + method, 1)) as connection,
    ):
        await until(lambda: c.gateway.budget.used(Account.UNSENT) > 0 and not c.gateway.num_open)
        connection.send(reset)
        await until(lambda: c.gateway.budget.used(Account.UNSENT) == 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.has_ended.wait(), 0.3)


async def test_other_connections_are_not_ended() -> None:
    async with (
        served(client_read_s=0.5) as (port, _, _),
        asyncio.timeout(50),
        open_channel(f"127.0.0.1:{port}", channel_options(60.0)) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with UnreadResponses.run("127.0.0.1", port, calls_of(CHECK, 1)) as connection:
            await connection.has_ended.wait()
        response = await stub.Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        assert not watch.done()
        watch.cancel()


async def test_watch_of_a_client_that_does_not_read_delays_no_other() -> None:
    health = Health("model")
    server = GrpcServer(heartbeat_s=30.0)
    server.follow(health)
    port = await server.start("127.0.0.1", 0)
    async with asyncio.timeout(50), UnreadResponses.run("127.0.0.1", port, calls_of(WATCH, 1)):
        async with open_channel(f"127.0.0.1:{port}", channel_options(60.0)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            health.ready("model")
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
        await server.stop(0.0)
