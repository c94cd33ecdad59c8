"""The client and operator APIs that the gRPC server calls."""

import asyncio
import gc
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from baton.core.client_api import Caller, GenerateChunk, GenerateStream, ProcessInfo, Timeline
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.errors import Code, Failure, Reason, Refused, StreamBroken
from baton.core.ids import DecisionId
from baton.core.kv.block_hash import token_ids
from baton.core.request import FinishReason
from baton.gateway import gateway_rules
from baton.gateway.grpc.inference_service import AdminService, InferenceService
from baton.gateway.http.openai_objects import timeline_object
from baton.gateway.input.response_size import ids_bytes, text_bytes
from baton.gateway.request.job_streams import JobStreams
from baton.gateway.request.open_request import OpenRequest
from baton.gateway.request.unread_output import UnreadOutput
from baton.gateway.text.chat_templates import ChatTemplates
from baton.gateway.text.tokenizer import ByteTokenizer
from baton.rpc.mappers.client_mapper import from_generate_request, from_tokenize_request, to_generate_request
from baton.runtime.process import loop_time
from baton.runtime.process.byte_budget import Account
from baton.v1.inference_pb2 import TokenizeRequest
from tests import builders
from tests.scripted_chats import chat_tokenizer, write
from tests.unit.gateway.fakes import ANONYMOUS, Cluster, answer_to, cluster, until
from tests.unit.gateway.output.output_cases import join_parts
from tests.unit.gateway.virtual import virtual

PD = (("p0", "prefill"), ("d0", "decode"))


def inference(c: Cluster) -> InferenceService:
    return InferenceService(c.gateway)


def admin(c: Cluster) -> AdminService:
    return AdminService(c.gateway, ProcessInfo(process_id="gateway-0", pid=5))


async def read_into(chunks: list[GenerateChunk], generation: GenerateStream) -> None:
    while not chunks or not chunks[-1].is_last:
        chunks.append(await generation.receive())


async def all_of(generation: GenerateStream) -> list[GenerateChunk]:
    chunks: list[GenerateChunk] = []
    await read_into(chunks, generation)
    return chunks


@virtual
async def test_generation_streams_and_ends_with_usage() -> None:
    async with cluster(*PD) as c:
        generation = await inference(c).generate(
            {"prompt": "hello", "max_tokens": 6, "n": 2, "timeline": True}, ANONYMOUS
        )
        chunks = await all_of(generation)
        for sample in range(2):
            text = "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == sample)
            assert text.encode() == answer_to(b"hello", 6, sample)
        assert len(chunks) > 4
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.num_prompt_tokens, chunks[-1].usage.num_output_tokens) == (5, 12)
        assert chunks[-1].timeline is not None
        assert chunks[-1].timeline.request_id == generation.request_id
        assert all(chunk.timeline is None for chunk in chunks[:-1])
        with pytest.raises(StreamBroken):
            await generation.receive()
        await generation.aclose()


async def timeline_of(c: Cluster) -> Timeline:
    chunks = await all_of(
        await inference(c).generate({"prompt": "hello", "max_tokens": 6, "timeline": True}, ANONYMOUS)
    )
    assert chunks[-1].timeline is not None
    return chunks[-1].timeline


@virtual
async def test_timeline_has_the_prediction_for_the_last_attempt() -> None:
    async with cluster(*PD, ("d1", "decode")) as c:

        def placed(query: PlacementQuery) -> Placement | Rejection:
            answer = c.scheduler.place_by_role(query)
            assert isinstance(answer, Placement)
            return replace(
                answer, waiting_s=0.25 + query.attempt, ttft_s=0.5 + query.attempt, tpot_s=0.03 + query.attempt
            )

        c.scheduler.answer = placed
        first = await timeline_of(c)
        assert (first.attempts, first.waiting_s, first.predicted_ttft_s, first.predicted_tpot_s) == (1, 0.25, 0.5, 0.03)
        assert {"waiting_s": 0.25, "predicted_ttft_s": 0.5, "predicted_tpot_s": 0.03}.items() <= timeline_object(
            [first]
        ).items()
        c.scheduler.workers[1].before_token = lambda worker, *_: worker.die()
        second = await timeline_of(c)
        assert (second.attempts, second.waiting_s, second.predicted_ttft_s, second.predicted_tpot_s) == (
            2,
            1.25,
            1.5,
            1.03,
        )


@virtual
async def test_timeline_omits_values_without_a_prediction() -> None:
    async with cluster(*PD) as c:
        timeline = await timeline_of(c)
        assert (timeline.waiting_s, timeline.predicted_ttft_s, timeline.predicted_tpot_s) == (0.0, None, None)
        assert not {"predicted_ttft_s", "predicted_tpot_s"} & timeline_object([timeline]).keys()


@virtual
async def test_invalid_request_is_rejected_before_it_runs() -> None:
    async with cluster(*PD) as c:
        with pytest.raises(Refused) as refused:
            await inference(c).generate({"prompt": ""}, ANONYMOUS)
        assert refused.value.failure.code is Code.INVALID_ARGUMENT
        assert c.scheduler.queries == []


@virtual
async def test_generation_fails_at_the_deadline_of_the_caller() -> None:
    async with cluster(*PD) as c:
        c.scheduler.workers[0].prefill_s = c.scheduler.workers[1].prefill_s = 100
        begin_s = asyncio.get_running_loop().time()
        generation = await inference(c).generate({"prompt": "x"}, Caller(timeout_s=0.7))
        with pytest.raises(Refused) as refused:
            await all_of(generation)
        assert refused.value.failure.reason is Reason.DEADLINE
        assert asyncio.get_running_loop().time() - begin_s == pytest.approx(0.7, abs=0.05)


@virtual
async def test_failure_is_raised_after_earlier_chunks_are_read() -> None:
    async with cluster(*PD) as c:
        failure = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="nan")
        c.scheduler.workers[1].before_token = lambda w, job, _s, index: w.fail_now(job, failure) if index == 3 else None
        generation = await inference(c).generate({"prompt": "x", "max_tokens": 9}, ANONYMOUS)
        chunks: list[GenerateChunk] = []
        with pytest.raises(Refused) as refused:
            await read_into(chunks, generation)
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices).encode() == answer_to(b"x", 3)
        assert refused.value.failure == failure


@virtual
async def test_closing_a_generation_cancels_its_request() -> None:
    async with cluster(*PD) as c:
        generation = await inference(c).generate({"prompt": "x", "max_tokens": 500}, ANONYMOUS)
        await generation.receive()
        await generation.aclose()
        await until(lambda: not any(w.open_jobs for w in c.scheduler.workers))
        assert c.gateway.num_open == 0


@virtual
async def test_closing_that_is_cancelled_gives_the_unread_bytes_back() -> None:
    """grpc cancels the call of a client that leaves with the last chunk, at any time."""
    async with cluster(*PD) as c:
        generation = await inference(c).generate({"prompt": "hello", "max_tokens": 6}, ANONYMOUS)
        await all_of(generation)
        assert c.gateway.budget.used(Account.UNSENT) > 0
        closing = asyncio.create_task(generation.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert c.gateway.budget.used(Account.UNSENT) == 0


@pytest.mark.fault("F-42")
@virtual
async def test_request_of_a_client_that_does_not_read_is_cancelled() -> None:
    async with cluster(*PD, stream_buffer_bytes=2000) as c:
        generation = await inference(c).generate({"prompt": "x", "max_tokens": 500}, ANONYMOUS)
        await until(lambda: c.scheduler.workers[1].cancels)
        assert c.scheduler.workers[1].cancels[0].reason is Reason.SLOW_READER
        with pytest.raises(Refused) as refused:
            await all_of(generation)
        assert (refused.value.failure.code, refused.value.failure.reason) == (Code.CANCELLED, Reason.SLOW_READER)


def request_objects() -> dict[int, object]:
    """Return the parts of all requests by id, those of other tests included."""
    return {id(each): each for each in gc.get_objects() if isinstance(each, (JobStreams, OpenRequest, UnreadOutput))}


@virtual
async def test_ended_request_is_freed_without_a_garbage_collection() -> None:
    """A full collection stops the event loop, for longer the more objects of ended requests there are."""
    async with cluster(*PD) as c:
        service = inference(c)
        earlier = request_objects()
        gc.disable()
        try:
            generation = await service.generate({"prompt": "hello", "max_tokens": 6, "n": 2}, ANONYMOUS)
            await all_of(generation)
            await generation.aclose()
            c.scheduler.workers[1].fail_job = lambda _: builders.failure()
            generation = await service.generate({"prompt": "hello", "max_tokens": 6}, ANONYMOUS)
            with suppress(Refused):
                await all_of(generation)
            await generation.aclose()
            c.scheduler.workers[1].fail_job = lambda _: None
            generation = await service.generate({"prompt": "hello", "max_tokens": 6}, ANONYMOUS)
            await generation.receive()
            await generation.aclose()
            del generation
            await asyncio.sleep(1)
            left = [type(each) for key, each in request_objects().items() if key not in earlier]
        finally:
            gc.enable()
    assert not left


@virtual
async def test_tokenize_models_and_status_return_values() -> None:
    async with cluster(*PD) as c:
        api = inference(c)
        async with api.tokenize({"prompt": "ab"}, ANONYMOUS) as ids:
            assert list(ids) == [97, 98]
            assert c.gateway.budget.used(Account.UNSENT) == ids_bytes(ids)
        async with api.detokenize({"tokens": [97, 511]}, ANONYMOUS) as text:
            assert text == "a\ufffd"
            assert c.gateway.budget.used(Account.UNSENT) == text_bytes(text)
        assert c.gateway.budget.used(Account.UNSENT) == 0
        for call in (
            api.detokenize({"tokens": list(token_ids([512]))}, ANONYMOUS),
            api.tokenize({"prompt": "ab", "model": "other"}, ANONYMOUS),
        ):
            with pytest.raises(Refused):
                await call.__aenter__()
        (model,) = await api.models(ANONYMOUS)
        assert (model.model_id, model.max_model_len) == ("demo", 1024)
        status = await admin(c).status(ANONYMOUS)
        assert [worker.worker.worker_id for worker in status.workers] == ["p0", "d0"]
        assert (status.model, status.gateway.pid) == ("demo", 5)
        assert status.scheduler == ProcessInfo(process_id="stub", pid=6, host="there", address="scheduler:1")
        c.scheduler.die()
        await until(lambda: c.gateway.view.scheduler is None)
        assert (await admin(c).status(ANONYMOUS)).scheduler is None


@virtual
async def test_status_has_the_links_to_present_workers() -> None:
    async with cluster(*PD) as c:
        links = (builders.link("p0"), builders.link("p0", epoch=9, broken=True), builders.link("gone", broken=True))
        reports = (builders.worker_report("p0", "prefill"), builders.worker_report("d0", "decode", links=links))
        c.gateway.view.update(ClusterUpdate(reports=reports, scheduler_id="stub"))
        workers = {worker.worker.worker_id: worker for worker in (await admin(c).status(ANONYMOUS)).workers}
        assert workers["d0"].links == links[:1]


@virtual
async def test_explain_and_drain_call_the_schedulers() -> None:
    async with cluster(*PD) as c:
        with pytest.raises(Refused) as refused:
            await admin(c).explain(None, ANONYMOUS)
        assert refused.value.failure.code is Code.NOT_FOUND
        record = DecisionRecord(
            decision_id=DecisionId("d"),
            scheduler_id="stub",
            policy="first",
            request_id=b"\1\2",
            attempt=0,
            query=builders.query(),
            placement=None,
            rejection=None,
        )
        c.scheduler.records = (record,)
        assert await admin(c).explain("0102", ANONYMOUS) == (record,)
        with pytest.raises(Refused):
            await admin(c).explain("no hex", ANONYMOUS)
        with pytest.raises(Refused, match="set --api-keys") as refused:
            await admin(c).drain("d0", Caller(address="ipv4:192.0.2.7:5000"))
        assert refused.value.failure.code is Code.PERMISSION_DENIED
        await admin(c).drain("d0", ANONYMOUS, node_shutting_down=True)
        with pytest.raises(Refused, match="known are: p0, d0"):
            await admin(c).drain("d7", ANONYMOUS)
        assert c.scheduler.drained == [("d0", True), ("d7", False)]
        with pytest.raises(Refused, match="may clear caches"):
            await admin(c).clear_tenant("default", Caller(address="ipv4:192.0.2.7:5000"))
        with pytest.raises(Refused, match="no API key belongs to tenant 'x'"):
            await admin(c).clear_tenant("x", ANONYMOUS)
        assert await admin(c).clear_tenant("default", ANONYMOUS) == ("d0", "p0")
        elsewhere = Caller(address="ipv4:192.0.2.7:5000")
        with pytest.raises(Refused, match="may export caches"):
            await admin(c).export_cache("default", "{}", never_called, elsewhere)
        with pytest.raises(Refused, match="may import caches"):
            await admin(c).import_cache("default", "", never_called(), elsewhere)
        with pytest.raises(Refused, match="exactly one of prompt and messages"):
            await admin(c).export_cache("default", "{}", never_called, ANONYMOUS)
        with pytest.raises(Refused, match="no API key belongs to tenant 'x'"):
            await admin(c).import_cache("x", "", never_called(), ANONYMOUS)
        assert c.scheduler.cleared == [b""]
        assert (await admin(c).cache_stats(ANONYMOUS)).total.num_requests == 1
        c.scheduler.die()
        with pytest.raises(Refused) as refused:
            await admin(c).drain("d0", ANONYMOUS)
        assert refused.value.failure.reason is Reason.SCHEDULER_LOST


def never_called(*_: Any) -> Any:
    """Stand for what a refused call must not use."""


# Chats.

CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
    "max_tokens": 200,
}


@virtual
async def test_chat_with_tools_is_parsed_into_parts() -> None:
    async with cluster(*PD, tokenizer=chat_tokenizer("qwen3")) as c:
        write(c, '<think>so</think>\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>')
        body = from_generate_request(to_generate_request(CHAT))
        chunks = await all_of(await inference(c).generate(body, ANONYMOUS))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        message = join_parts(part for choice in choices for part in choice.parts)
        assert message.reasoning == "so"
        assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"a": 1}')]
        assert choices[-1].finish is FinishReason.TOOL_CALLS
        assert not any(choice.text for choice in choices)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.num_reasoning_tokens >= 2


@virtual
async def test_ignored_fields_are_named_and_counted() -> None:
    async with cluster(*PD) as c:
        generation = await inference(c).generate(
            {"prompt": "x", "max_tokens": 1, "fields_json": '{"wish": 1, "echo": false}'}, ANONYMOUS
        )
        assert generation.ignored_fields == ("wish",)
        assert c.registry.get_sample_value("baton_ignored_fields_total", {"field": "wish"}) == 1
        await all_of(generation)


@virtual
async def test_prompt_of_a_chat_is_tokenized() -> None:
    async with cluster(*PD) as c:
        chat = TokenizeRequest(fields_json='{"messages": [{"role": "user", "content": "hi"}], "wish": 1}')
        async with inference(c).tokenize(from_tokenize_request(chat), ANONYMOUS) as ids:
            assert bytes(ids.tolist()) == b"user: hi\nassistant: "
        assert c.registry.get_sample_value("baton_ignored_fields_total", {"field": "wish"}) == 1
        both = TokenizeRequest(prompt="x", fields_json=chat.fields_json)
        with pytest.raises(Refused, match=r"both fields_json.messages and a prompt"):
            async with inference(c).tokenize(from_tokenize_request(both), ANONYMOUS):
                pass


@virtual
async def test_only_a_large_chat_is_tokenized_with_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both APIs have one rule. A schema has no part in it, because it is not read."""
    in_thread: list[int] = []

    async def at_once(function: Callable[[], Any]) -> Any:
        in_thread.append(1)
        return function()

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    chat = {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}, "wish": ""}
    most = loop_time.JSON_BYTES - len(json.dumps(chat))
    async with cluster(*PD) as c:
        for size, times in ((most, 0), (most + 1, 2)):  # the JSON is parsed, and then read
            body = {"fields_json": json.dumps(chat | {"wish": "x" * size})}
            async with inference(c).tokenize(body, ANONYMOUS) as ids:
                assert bytes(ids.tolist()) == b"user: hi\nassistant: "
            assert sum(in_thread) == times


@virtual
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"fields_json": "{"}, "fields_json is not valid JSON: "),
        ({"fields_json": "[]"}, "fields_json is a list; must be a JSON object"),
        ({"fields_json": '{"a": 1, "a": 2}'}, "fields_json has the key 'a' twice"),
        ({"fields_json": '{"a": NaN}'}, "fields_json contains NaN"),
        ({"fields_json": '{"a":' * 40 + "1" + "}" * 40}, "fields_json is nested too deeply"),
        ({"fields_json": "\ud800"}, "fields_json contains a lone surrogate"),
        ({"fields_json": '{"stream": false}'}, "fields_json.stream is implied"),
        ({"fields_json": '{"prompt": "y"}'}, "fields_json.prompt is set in the message, too"),
        ({"fields_json": '{"echo": true}'}, "fields_json.echo has no effect over gRPC"),
        ({"fields_json": '{"prompt_logprobs": 0}'}, "send the request over HTTP"),
        ({"fields_json": '{"top_logprobs": 2}'}, "set logprobs in the message"),
        ({"fields_json": '{"deadline_s": 2}'}, "fields_json.deadline_s has no effect over gRPC: set the deadline of"),
        ({"fields_json": '{"best_of": 2}'}, r"fields_json.best_of is 2; must be equal to n \(1\)"),
        ({"n": 0}, "n is 0; must be"),
        ({"fields_json": '{"model": "x"}'}, "fields_json.model 'x' is not served; the served model is 'demo'"),
        ({"fields_json": '{"suffix": "y"}'}, "fields_json.suffix is not implemented: a model needs"),
        ({"fields_json": '{"tools": []}'}, "fields_json.tools is for chats; set fields_json.messages, too"),
        ({"fields_json": '{"messages": [{"role": "user", "content": "x"}]}'}, "both fields_json.messages and a prompt"),
        ({"prompt": None, "fields_json": '{"messages": [{"role": "x"}]}'}, r"fields_json.messages\[0\].role is 'x'; "),
        ({"prompt": None}, "the prompt is missing; set prompt, token_ids or fields_json.messages"),
        ({"prompt": [999], "max_tokens": 1}, "token_ids contains the token id 999"),
    ],
)
async def test_error_names_the_field_of_the_message(fields: dict[str, Any], error: str) -> None:
    async with cluster(*PD) as c:
        with pytest.raises(Refused, match=f"^{error}|^[^;]*: {error}"):
            await inference(c).generate({"prompt": "x"} | fields, ANONYMOUS)


@virtual
async def test_detokenization_names_the_field_of_the_message() -> None:
    async with cluster(*PD) as c:
        with pytest.raises(Refused, match=r"^token_ids contains the token id 99999"):
            async with inference(c).detokenize({"tokens": [99999]}, ANONYMOUS):
                pass


@virtual
@pytest.mark.parametrize(
    ("source", "changes", "event", "tool_parser"),
    [
        ("{{ tools }}<tool_call></think>", {}, "output_format_chosen", "hermes"),
        ("{{ tools }}[f(a=1)]", {}, "tool_format_unknown", "none"),
        ("{{ tools }}[f(a=1)]", {"tool_parser": "none"}, "output_format_chosen", "none"),
        ("{{ messages }}", {}, "output_format_chosen", "none"),
    ],
)
async def test_format_of_calls_is_logged(
    source: str, changes: dict[str, str], event: str, tool_parser: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = ByteTokenizer(chat_templates=ChatTemplates({"default": source}, {}))
    with caplog.at_level(logging.INFO):
        async with cluster(*PD, tokenizer=tokenizer, **changes):
            pass
    messages: list[Any] = [record.msg for record in caplog.records if record.name == gateway_rules.__name__]
    assert (event, tool_parser) in [(each["event"], each.get("tool_parser")) for each in messages]
