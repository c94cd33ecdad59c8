"""Clients read a gRPC stream to its end, also beyond its deadline, so that all that follows is recorded."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from baton.rpc.inference_rpc import REQUEST_ID_KEY
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc as pb_grpc
from tests.cluster import GatewayAddresses
from tests.nemesis.cases import GRPC, Case
from tests.nemesis.clients import Clients
from tests.nemesis.history import Answer, ChoiceOutput, End, Record, Surroundings, check_history

PART = pb.GenerateResponse(
    choices=[pb.ChoiceDelta(index=0, text="a", token_ids=[5], finish_reason=pb.FINISH_REASON_LENGTH)]
)
USAGE = pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=1))
RIGHT = Answer(
    choices={0: ChoiceOutput(text="a", token_ids=[5], finishes=["length"])},
    usage=(3, 1),
    num_ends=1,
)


HOLD_S = 1.5


@asynccontextmanager
async def held_back(port: int, hold_s: float) -> AsyncIterator[int]:
    """Serve a port that passes on to `port`. It delivers answers `hold_s` late."""
    tasks: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(delay_s)
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind = await asyncio.open_connection("127.0.0.1", port)
        settings = await behind_reader.read(65536)  # without them, the client does not send its request
        writer.write(settings)
        tasks.add(asyncio.create_task(pass_on(reader, behind, 0.0)))
        tasks.add(asyncio.create_task(pass_on(behind_reader, writer, hold_s)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def gateway(
    messages: Sequence[pb.GenerateResponse], code: grpc.StatusCode, *, busy_s: float = 0.0, hold_s: float = 0.0
) -> AsyncIterator[Clients]:
    """Serve these messages and a status to every request, `busy_s` after the first message.

    hold_s: time by which the network delays what the gateway sends.
    """

    class Servicer(pb_grpc.InferenceServicer):
        async def Generate(self, message: Any, context: Any) -> None:  # noqa: N802
            await context.send_initial_metadata(((REQUEST_ID_KEY, "1"),))
            for each in messages:
                await context.write(each)
                await asyncio.sleep(busy_s)
            if code is not grpc.StatusCode.OK:
                await context.abort(code, "the worker is lost", (("baton-reason", "worker_lost"),))

    server = grpc.aio.server()
    pb_grpc.add_InferenceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with held_back(port, hold_s) as outside:
            addresses = {"gateway": GatewayAddresses(url="", grpc_address=f"127.0.0.1:{outside}")}
            yield Clients(addresses, asyncio.get_running_loop().time)
    finally:
        await server.stop(None)


async def answered(*messages: pb.GenerateResponse, code: grpc.StatusCode = grpc.StatusCode.OK) -> Record:
    case = Case(name="case", api=GRPC, body={"prompt": [1, 2, 3], "max_tokens": 1})
    async with gateway(messages, code) as clients:
        return await clients.send(case, "gateway", is_stream=True, deadline_s=30.0)


@pytest.mark.parametrize(
    ("messages", "kinds"),
    [
        ([PART, USAGE], set()),
        ([PART, USAGE, USAGE], {"doubled"}),
        ([PART, USAGE, PART], {"doubled"}),
        ([PART], {"truncated", "wrong"}),
    ],
)
async def test_stream_is_read_to_its_end(messages: Sequence[pb.GenerateResponse], kinds: set[str]) -> None:
    record = await answered(*messages)
    assert record.ends == [End.COMPLETE]
    assert {problem.kind for problem in check_history([record], {"case": RIGHT}, Surroundings())} == kinds


async def test_error_after_the_usage_is_a_second_end() -> None:
    record = await answered(PART, USAGE, code=grpc.StatusCode.UNAVAILABLE)
    assert record.ends == [End.ERROR]
    assert [problem.kind for problem in check_history([record], {"case": RIGHT}, Surroundings())] == ["doubled"]


async def test_client_does_not_end_a_call_at_its_deadline_but_waits_for_the_gateway() -> None:
    case = Case(name="case", api=GRPC, body={"prompt": [1, 2, 3], "max_tokens": 1})
    async with gateway([PART, USAGE], grpc.StatusCode.OK, busy_s=30.0) as clients:
        in_time = await clients.send(case, "gateway", is_stream=True, deadline_s=0.5)
    assert (in_time.ends, in_time.reason) == ([End.ERROR], "deadline")
    async with gateway([PART, USAGE], grpc.StatusCode.OK, busy_s=30.0, hold_s=HOLD_S) as clients:
        late = await clients.send(case, "gateway", is_stream=True, deadline_s=0.5)
    assert (late.ends, late.reason) == ([End.ERROR], "deadline")
    assert late.end_s is not None
    assert late.end_s >= late.deadline_s + HOLD_S - 0.5
