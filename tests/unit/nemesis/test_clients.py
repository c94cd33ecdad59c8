"""Clients read a gRPC stream to its end, so that what follows the end of an answer is recorded."""

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


@asynccontextmanager
async def gateway(messages: Sequence[pb.GenerateResponse], code: grpc.StatusCode) -> AsyncIterator[Clients]:
    """Serve these messages and a status to every request."""

    class Servicer(pb_grpc.InferenceServicer):
        async def Generate(self, message: Any, context: Any) -> None:  # noqa: N802
            await context.send_initial_metadata(((REQUEST_ID_KEY, "1"),))
            for each in messages:
                await context.write(each)
            if code is not grpc.StatusCode.OK:
                await context.abort(code, "the worker is lost", (("baton-reason", "worker_lost"),))

    server = grpc.aio.server()
    pb_grpc.add_InferenceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        addresses = {"gateway": GatewayAddresses(url="", grpc_address=f"127.0.0.1:{port}")}
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
