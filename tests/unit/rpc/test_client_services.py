"""The client gRPC API: servicers, Baton's own clients and plain gRPC clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.client_api import (
    Caller,
    ChoiceDelta,
    ClusterStatus,
    GenerateChunk,
    ModelInfo,
    ProcessInfo,
    Timeline,
    TotalUsage,
    WorkerStatus,
)
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Rejection
from baton.core.cluster.worker_report import WorkerState
from baton.core.errors import Code, Failure, Reason, Refused, StreamBroken
from baton.core.ids import DecisionId
from baton.core.request import FinishReason, LegTimeline, TokenLogprobs
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.inference_rpc import InferenceClient
from baton.rpc.mappers.client_mapper import from_generate_request, to_generate_request
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests import builders
from tests.contract.networks import eventually
from tests.unit.rpc.client_api_stubs import CACHE_STATS, StubAdmin, StubGenerateStream, StubInference

BODY = {"prompt": "once upon", "max_tokens": 4, "stream": True, "return_token_ids": True}
LAST = GenerateChunk(
    choices=(ChoiceDelta(index=0, text=".", token_ids=(9,), finish=FinishReason.STOP),),
    usage=TotalUsage(num_prompt_tokens=5, num_output_tokens=2, num_cached_tokens=4),
    timeline=Timeline(
        request_id="req-1",
        attempts=1,
        policy="round_robin",
        placed_s=0.001,
        total_s=0.5,
        ttft_s=0.25,
        waiting_s=0.0,
        predicted_ttft_s=0.2,
        legs=(LegTimeline(worker_id="p0", pid=7, compute_s=0.2, kv_bytes=2**40),),
    ),
)
CHUNKS = (
    GenerateChunk(
        choices=(
            ChoiceDelta(
                index=1,
                text="ä",
                token_ids=(7, 8),
                logprobs=(TokenLogprobs(logprob=-0.5, top=((7, -0.5), (1, -2.0))),) * 2,
            ),
            ChoiceDelta(index=0),
        )
    ),
    LAST,
)


class GatewayServer:
    """A running gRPC server with stub services, and a channel to it."""

    def __init__(
        self, server: GrpcServer, channel: grpc.aio.Channel, inference: StubInference, admin: StubAdmin
    ) -> None:
        self.server, self.channel, self.api, self.admin = server, channel, inference, admin
        self.stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

    def client(self, **options: Any) -> InferenceClient:
        return InferenceClient(self.channel, "gateway", call_s=60.0, **options)

    def admin_client(self, **options: Any) -> AdminClient:
        return AdminClient(self.channel, "gateway", call_s=60.0, **options)


STATUS = ClusterStatus(
    version="0.1",
    model="demo",
    gateway=ProcessInfo(process_id="g1", pid=11, host="here"),
    workers=(WorkerStatus.of(builders.worker_report("w0", links=(builders.link("w1"),), state=WorkerState.DRAINING)),),
    open_requests=3,
)
RECORD = DecisionRecord(
    decision_id=DecisionId("d1"),
    scheduler_id="s1",
    policy="round_robin",
    request_id=b"\x01\xff",
    attempt=0,
    query=builders.query(avoid=(builders.worker_ref(epoch=2**64 - 1),)),
    placement=None,
    rejection=Rejection(reason=Reason.NO_CAPACITY, message="full", retry_after_s=2.0),
    actuals={"outcome": "rejected"},
)


@asynccontextmanager
async def gateway_with(read_s: float) -> AsyncIterator[GatewayServer]:
    server = GrpcServer(heartbeat_s=10.0, read_s=read_s)
    inference, admin = StubInference(), StubAdmin(STATUS, (RECORD,))
    server.add_inference(inference)
    server.add_admin(admin)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start('127.0.0.1', 0)}") as channel:
        yield GatewayServer(server, channel, inference, admin)
    await server.stop(0)


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayServer]:
    async with gateway_with(read_s=60.0) as gateway:
        yield gateway


# Generate


async def test_generate_streams_each_chunk_as_it_is_produced(gateway: GatewayServer) -> None:
    gateway.api.answer = answer = StubGenerateStream("req-7")
    answer.ignored_fields = ("wish", "messages[].mood")
    generation = await gateway.client().generate(BODY)
    assert generation.request_id == "req-7"
    assert generation.ignored_fields == answer.ignored_fields
    for chunk in CHUNKS:
        answer.put(chunk)
        assert await generation.receive() == chunk
    with pytest.raises(StreamBroken):
        await generation.receive()
    assert answer.is_closed
    assert gateway.api.calls[0][0] == BODY


async def test_plain_grpc_client_receives_usage_and_request_id(gateway: GatewayServer) -> None:
    gateway.api.answer = answer = StubGenerateStream("req-8")
    answer.put(*CHUNKS)
    call = gateway.stub.Generate(inference_pb2.GenerateRequest(prompt="hello"))
    messages = [message async for message in call]
    assert dict(await call.initial_metadata())["x-request-id"] == "req-8"
    assert await call.code() is grpc.StatusCode.OK
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens) == (5, 2, 7, 4)
    assert not messages[0].HasField("usage")
    assert messages[1].choices[0].finish_reason == inference_pb2.FINISH_REASON_STOP
    assert not messages[0].choices[1].HasField("finish_reason")


async def test_gateway_receives_authorization_timeout_and_address_of_the_caller(gateway: GatewayServer) -> None:
    gateway.api.answer = answer = StubGenerateStream()
    answer.put(LAST)
    client = gateway.client(authorization="Bearer secret")
    await (await client.generate(BODY, timeout_s=30)).receive()
    _, caller = gateway.api.calls[0]
    assert isinstance(caller, Caller)
    assert caller.authorization == "Bearer secret"
    assert caller.timeout_s is not None
    assert 0 < caller.timeout_s < 31  # rounded up on its way
    assert caller.address


async def test_deadline_of_a_call_is_cut_to_24_hours(gateway: GatewayServer) -> None:
    gateway.api.answer = answer = StubGenerateStream()
    answer.put(LAST)
    await (await gateway.client().generate(BODY, timeout_s=10 * 86_400)).receive()
    assert gateway.api.calls[0][1].timeout_s == 86_400


async def test_call_without_key_and_deadline_has_no_authorization_and_timeout(gateway: GatewayServer) -> None:
    gateway.api.answer = answer = StubGenerateStream()
    answer.put(LAST)
    await (await gateway.client().generate(BODY)).receive()
    assert gateway.api.calls[0][1].authorization == ""
    assert gateway.api.calls[0][1].timeout_s is None


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (
            Failure(code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_REQUEST, message="n must be 1"),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.QUEUE_FULL, message="full", retry_after_s=1.5),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        (
            Failure(code=Code.UNAUTHENTICATED, reason=Reason.INVALID_REQUEST, message="no key"),
            grpc.StatusCode.UNAUTHENTICATED,
        ),
        (
            Failure(code=Code.NOT_FOUND, reason=Reason.MODEL_NOT_FOUND, message="no such model"),
            grpc.StatusCode.NOT_FOUND,
        ),
        (
            Failure(code=Code.UNAVAILABLE, reason=Reason.NO_WORKERS, message="none", retry_after_s=3),
            grpc.StatusCode.UNAVAILABLE,
        ),
        (
            Failure(code=Code.DEADLINE_EXCEEDED, reason=Reason.DEADLINE, message="late"),
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ),
    ],
)
@pytest.mark.parametrize("first", [(), CHUNKS[:1]])
async def test_failure_before_and_during_the_stream_has_its_grpc_status(
    gateway: GatewayServer, failure: Failure, status: grpc.StatusCode, first: tuple[GenerateChunk, ...]
) -> None:
    answer = StubGenerateStream()
    answer.put(*first, Refused(failure))
    gateway.api.answer = answer if first else Refused(failure)
    call = gateway.stub.Generate(inference_pb2.GenerateRequest(prompt="hello"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _ = [message async for message in call]
    assert error.value.code() is status
    assert error.value.details() == failure.message
    trailing = dict(error.value.trailing_metadata() or ())
    assert trailing["baton-reason"] == failure.reason.value
    assert float(trailing.get("retry-after-s", "0")) == (failure.retry_after_s or 0)
    assert "baton-failure-bin" not in trailing


async def test_own_client_raises_the_original_failure(gateway: GatewayServer) -> None:
    failure = Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.TTFT_SLO, message="too slow", retry_after_s=0.25)
    gateway.api.answer = Refused(failure)
    with pytest.raises(Refused) as refused:
        await gateway.client().generate(BODY)
    assert refused.value.failure == failure
    gateway.api.answer = answer = StubGenerateStream()
    answer.put(CHUNKS[0], Refused(failure))
    generation = await gateway.client().generate(BODY)
    assert await generation.receive() == CHUNKS[0]
    with pytest.raises(Refused) as refused:
        await generation.receive()
    assert refused.value.failure == failure


async def test_error_message_longer_than_a_header_is_truncated(gateway: GatewayServer) -> None:
    message = "ä is not allowed; " * 10_000
    gateway.api.answer = Refused(Failure(code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_REQUEST, message=message))
    with pytest.raises(Refused) as refused:
        await gateway.client().generate(BODY)
    assert refused.value.failure.code is Code.INVALID_ARGUMENT
    assert message.startswith(str(refused.value))


async def test_internal_error_is_logged_and_not_shown_to_the_client(
    gateway: GatewayServer, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.api.answer = KeyError("secret internals")
    with pytest.raises(Refused) as refused:
        await gateway.client().generate(BODY)
    assert refused.value.failure.code is Code.INTERNAL
    assert "secret" not in str(refused.value)
    assert "secret internals" in caplog.text


async def test_generation_is_closed_when_the_client_cancels(gateway: GatewayServer) -> None:
    gateway.api.answer = answer = StubGenerateStream()
    answer.put(CHUNKS[0])
    generation = await gateway.client().generate(BODY)
    assert await generation.receive() == CHUNKS[0]
    await generation.aclose()
    await eventually(lambda: answer.is_closed)


async def receive_all(client: InferenceClient, timeout_s: float, received: list[GenerateChunk]) -> None:
    generation = await client.generate(BODY, timeout_s=timeout_s)
    while True:
        received.append(await generation.receive())


async def test_generation_is_closed_when_the_deadline_passes(gateway: GatewayServer) -> None:
    for timeout_s in (0.3, 3.0, 20.0):  # the first chunk must arrive in this time
        gateway.api.answer = answer = StubGenerateStream()
        answer.put(CHUNKS[0])
        received: list[GenerateChunk] = []
        with pytest.raises(StreamBroken, match="DEADLINE_EXCEEDED"):
            await receive_all(gateway.client(), timeout_s, received)
        if received:
            break
    assert received == [CHUNKS[0]]
    await eventually(lambda: answer.is_closed)


async def test_client_that_does_not_read_is_disconnected() -> None:
    async with gateway_with(read_s=0.2) as gateway:
        gateway.api.answer = answer = StubGenerateStream()
        call = gateway.stub.Generate(inference_pb2.GenerateRequest(prompt="hello"))
        answer.put(*[GenerateChunk(choices=(ChoiceDelta(index=0, text="x" * 4096),))] * 4096)
        await eventually(lambda: answer.is_closed)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


# Conversion of a request to a body


def test_body_has_only_fields_that_the_client_set() -> None:
    always = {"stream": True, "return_token_ids": True}
    assert from_generate_request(inference_pb2.GenerateRequest()) == always
    message = inference_pb2.GenerateRequest(prompt="", temperature=0.0, n=0, ignore_eos=False, seed=-1)
    assert from_generate_request(message) == {
        **always,
        "prompt": "",
        "temperature": 0.0,
        "n": 0,
        "ignore_eos": False,
        "seed": -1,
    }


def test_token_ids_become_the_prompt_and_exclude_a_text_prompt() -> None:
    assert from_generate_request(inference_pb2.GenerateRequest(token_ids=[1, 2]))["prompt"] == [1, 2]
    with pytest.raises(Refused, match="both prompt and token_ids"):
        from_generate_request(inference_pb2.GenerateRequest(token_ids=[1, 2], prompt="x"))


I64 = st.integers(-(2**63), 2**63 - 1)
NUMBER = st.floats(allow_nan=False)
U32 = st.integers(0, 2**32 - 1)
BODIES = st.fixed_dictionaries(
    {"stream": st.just(True), "return_token_ids": st.just(True)},
    optional={
        "model": st.text(max_size=5),
        "prompt": st.text(max_size=5) | st.lists(U32, min_size=1, max_size=4),
        **dict.fromkeys(("max_tokens", "top_k", "seed", "n", "logprobs", "min_tokens", "priority"), I64),
        **dict.fromkeys(
            ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
            NUMBER,
        ),
        **dict.fromkeys(("ignore_eos", "timeline", "skip_special_tokens"), st.booleans()),
        "stop": st.lists(st.text(max_size=4), min_size=1, max_size=3),
        "stop_token_ids": st.lists(U32, min_size=1, max_size=3),
        "logit_bias": st.dictionaries(U32.map(str), NUMBER, min_size=1, max_size=3),
        "slo": st.fixed_dictionaries({}, optional={"ttft_ms": NUMBER, "tpot_ms": NUMBER}),
    },
)


@given(body=BODIES)
@settings(max_examples=50, deadline=None)
def test_body_is_unchanged_after_serialization(body: dict[str, Any]) -> None:
    raw = to_generate_request(body).SerializeToString()
    assert from_generate_request(inference_pb2.GenerateRequest.FromString(raw)) == body


def test_body_has_every_field_of_the_proto() -> None:
    """A field that is added to the proto but not to the mapper would be ignored without an error."""
    message = inference_pb2.GenerateRequest(
        **{
            f.name: _sample(f)
            for f in inference_pb2.GenerateRequest.DESCRIPTOR.fields
            if f.name not in ("prompt", "slo", "logit_bias")
        },
        slo=inference_pb2.Slo(ttft_ms=1, tpot_ms=1),
        logit_bias={1: 1.0},
    )
    body = from_generate_request(message)
    names = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields} - {"token_ids"}
    assert names <= body.keys()
    assert set(body["slo"]) == {field.name for field in inference_pb2.Slo.DESCRIPTOR.fields}


def _sample(field: Any) -> Any:
    value = "x" if field.cpp_type == field.CPPTYPE_STRING else 1
    return [value] if field.is_repeated else value


# Other calls


async def test_tokenize_detokenize_and_models_return_values_and_failures(gateway: GatewayServer) -> None:
    client = gateway.client()
    assert list(await client.tokenize("ab")) == [97, 98]
    assert await client.detokenize(await client.tokenize("ab")) == "ab"
    assert await client.models() == (ModelInfo(model_id="demo", max_model_len=1024), ModelInfo(model_id="other"))
    assert [body for body, _ in gateway.api.calls] == [{"prompt": "ab"}, {"prompt": "ab"}, {"tokens": [97, 98]}, {}]
    gateway.api.answer = Refused(builders.failure())
    with pytest.raises(Refused):
        await client.tokenize("ab")


async def test_admin_calls_return_values_and_failures(gateway: GatewayServer) -> None:
    client = gateway.admin_client(authorization="Bearer admin")
    assert await client.status() == STATUS
    assert gateway.admin.callers[0].authorization == "Bearer admin"
    assert await client.explain() == (RECORD,)
    assert await client.explain("req-1") == (RECORD,)
    await client.drain("w0", node_shutting_down=True)
    with pytest.raises(Refused, match="there is no worker w9") as refused:
        await client.drain("w9")
    assert refused.value.failure.code is Code.NOT_FOUND
    assert await client.clear_tenant("search") == ("w0", "w1")
    assert await client.cache_stats() == CACHE_STATS
    assert gateway.admin.calls == [None, "req-1", ("w0", True), ("w9", False), "search"]


async def test_exports_and_imports_carry_files(gateway: GatewayServer) -> None:
    client, answers = gateway.admin_client(), list[Any]()

    async def write(answer: Any) -> None:
        answers.append(answer)

    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        yield b"second" * 50_000

    await client.export_cache("search", "{}", write)
    assert (answers[0].worker_id, answers[0].num_tokens, answers[0].num_prompt_tokens) == ("w0", 32, 40)
    assert answers[0].num_bytes == len(b"".join(answers[1:])) == 5003
    imported = await client.import_cache("search", "w0", parts())
    assert (imported.num_tokens, imported.num_cached_before, imported.num_file_tokens) == (32, 16, 48)
    assert gateway.admin.calls == [("search", "{}"), ("search", "w0", b"first" + b"second" * 50_000)]


async def test_call_without_a_gateway_raises_stream_broken() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:9") as channel:
        with pytest.raises(StreamBroken):
            await asyncio.wait_for(AdminClient(channel, "gateway").status(), 60)
