"""The front door over gRPC: servicers, our own clients, and clients that know nothing of us."""

import asyncio
from collections.abc import AsyncIterator
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
from tests.unit.rpc.front_stubs import StubAdmin, StubGeneration, StubInference

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


class Front:
    """A served gateway, and a channel to it."""

    def __init__(
        self, server: GrpcServer, channel: grpc.aio.Channel, inference: StubInference, admin: StubAdmin
    ) -> None:
        self.server, self.channel, self.api, self.admin = server, channel, inference, admin
        self.stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

    def client(self, **options: Any) -> InferenceClient:
        return InferenceClient(self.channel, "gateway", **options)

    def admin_client(self, **options: Any) -> AdminClient:
        return AdminClient(self.channel, "gateway", **options)


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


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    server = GrpcServer(heartbeat_s=0.2)
    inference, admin = StubInference(), StubAdmin(STATUS, (RECORD,))
    server.add_inference(inference)
    server.add_admin(admin)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start('127.0.0.1', 0)}") as channel:
        yield Front(server, channel, inference, admin)
    await server.stop(0)


# Generate


async def test_an_answer_arrives_chunk_by_chunk(front: Front) -> None:
    front.api.answer = answer = StubGeneration("req-7")
    generation = await front.client().generate(BODY)
    assert generation.request_id == "req-7"
    for chunk in CHUNKS:
        answer.put(chunk)
        assert await generation.receive() == chunk
    with pytest.raises(StreamBroken):
        await generation.receive()
    assert answer.is_closed
    assert front.api.asked[0][0] == BODY


async def test_a_plain_client_reads_totals_and_the_request_id(front: Front) -> None:
    front.api.answer = answer = StubGeneration("req-8")
    answer.put(*CHUNKS)
    call = front.stub.Generate(inference_pb2.GenerateRequest(prompt="hello"))
    messages = [message async for message in call]
    assert dict(await call.initial_metadata())["x-request-id"] == "req-8"
    assert await call.code() is grpc.StatusCode.OK
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens) == (5, 2, 7, 4)
    assert not messages[0].HasField("usage")
    assert messages[1].choices[0].finish_reason == inference_pb2.FINISH_REASON_STOP
    assert not messages[0].choices[1].HasField("finish_reason")


async def test_the_gateway_gets_the_caller(front: Front) -> None:
    front.api.answer = answer = StubGeneration()
    answer.put(LAST)
    client = front.client(authorization="Bearer secret")
    await (await client.generate(BODY, timeout_s=30)).receive()
    _, caller = front.api.asked[0]
    assert isinstance(caller, Caller)
    assert caller.authorization == "Bearer secret"
    assert caller.timeout_s is not None
    assert 0 < caller.timeout_s < 31  # rounded up on its way
    assert caller.address


async def test_a_call_without_key_or_deadline_has_neither(front: Front) -> None:
    front.api.answer = answer = StubGeneration()
    answer.put(LAST)
    await (await front.client().generate(BODY)).receive()
    assert front.api.asked[0][1].authorization == ""
    assert front.api.asked[0][1].timeout_s is None


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
async def test_a_failure_has_its_status_before_and_in_mid_stream(
    front: Front, failure: Failure, status: grpc.StatusCode, first: tuple[GenerateChunk, ...]
) -> None:
    answer = StubGeneration()
    answer.put(*first, Refused(failure))
    front.api.answer = answer if first else Refused(failure)
    call = front.stub.Generate(inference_pb2.GenerateRequest(prompt="hello"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _ = [message async for message in call]
    assert error.value.code() is status
    assert error.value.details() == failure.message
    trailing = dict(error.value.trailing_metadata() or ())
    assert trailing["baton-reason"] == failure.reason.value
    assert float(trailing.get("retry-after-s", "0")) == (failure.retry_after_s or 0)
    assert "baton-failure-bin" not in trailing


async def test_our_client_gets_the_failure_itself(front: Front) -> None:
    failure = Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.TTFT_SLO, message="too slow", retry_after_s=0.25)
    front.api.answer = Refused(failure)
    with pytest.raises(Refused) as refused:
        await front.client().generate(BODY)
    assert refused.value.failure == failure
    front.api.answer = answer = StubGeneration()
    answer.put(CHUNKS[0], Refused(failure))
    generation = await front.client().generate(BODY)
    assert await generation.receive() == CHUNKS[0]
    with pytest.raises(Refused) as refused:
        await generation.receive()
    assert refused.value.failure == failure


async def test_a_message_longer_than_a_header_still_arrives(front: Front) -> None:
    message = "ä is not allowed; " * 10_000
    front.api.answer = Refused(Failure(code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_REQUEST, message=message))
    with pytest.raises(Refused) as refused:
        await front.client().generate(BODY)
    assert refused.value.failure.code is Code.INVALID_ARGUMENT
    assert message.startswith(str(refused.value))


async def test_a_bug_is_no_clients_business(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    front.api.answer = KeyError("secret internals")
    with pytest.raises(Refused) as refused:
        await front.client().generate(BODY)
    assert refused.value.failure.code is Code.INTERNAL
    assert "secret" not in str(refused.value)
    assert "secret internals" in caplog.text


async def test_a_client_that_goes_away_closes_its_generation(front: Front) -> None:
    front.api.answer = answer = StubGeneration()
    answer.put(CHUNKS[0])
    generation = await front.client().generate(BODY)
    await generation.receive()
    await generation.aclose()
    await eventually(lambda: answer.is_closed)


async def test_a_deadline_that_passes_closes_its_generation(front: Front) -> None:
    front.api.answer = answer = StubGeneration()
    answer.put(CHUNKS[0])
    generation = await front.client().generate(BODY, timeout_s=0.3)
    assert await generation.receive() == CHUNKS[0]
    with pytest.raises(StreamBroken, match="DEADLINE_EXCEEDED"):
        await generation.receive()
    await eventually(lambda: answer.is_closed)


async def test_client_that_does_not_read_is_disconnected(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.rpc.inference_rpc.WRITE_S", 0.2)
    front.api.answer = answer = StubGeneration()
    call = front.stub.Generate(inference_pb2.GenerateRequest(prompt="hello"))
    answer.put(*[GenerateChunk(choices=(ChoiceDelta(index=0, text="x" * 100_000),))] * 200)
    await eventually(lambda: answer.is_closed)
    call.cancel()


# The request as a dict


def test_only_what_a_client_set_is_in_the_body() -> None:
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


def test_token_ids_are_a_prompt() -> None:
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


def test_every_field_of_a_request_is_passed_on() -> None:
    """A field that is added to the proto and forgotten here would be silently ignored."""
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


# The other calls


async def test_text_and_tokens(front: Front) -> None:
    client = front.client()
    assert list(await client.tokenize("ab")) == [97, 98]
    assert await client.detokenize(await client.tokenize("ab")) == "ab"
    assert await client.models() == (ModelInfo(model_id="demo", max_model_len=1024), ModelInfo(model_id="other"))
    assert [body for body, _ in front.api.asked] == [{"prompt": "ab"}, {"prompt": "ab"}, {"tokens": [97, 98]}, {}]
    front.api.answer = Refused(builders.failure())
    with pytest.raises(Refused):
        await client.tokenize("ab")


async def test_operators(front: Front) -> None:
    client = front.admin_client(authorization="Bearer admin")
    assert await client.status() == STATUS
    assert front.admin.callers[0].authorization == "Bearer admin"
    assert await client.explain() == (RECORD,)
    assert await client.explain("req-1") == (RECORD,)
    await client.drain("w0", node_shutting_down=True)
    with pytest.raises(Refused, match="there is no worker w9") as refused:
        await client.drain("w9")
    assert refused.value.failure.code is Code.NOT_FOUND
    assert front.admin.asked == [None, "req-1", ("w0", True), ("w9", False)]


async def test_a_missing_gateway_is_reported() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:9") as channel:
        with pytest.raises(StreamBroken):
            await asyncio.wait_for(AdminClient(channel, "gateway").status(), 5)
