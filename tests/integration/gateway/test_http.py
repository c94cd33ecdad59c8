"""The HTTP API over a real server on loopback: the OpenAI client, and the fields and routes of Baton."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from baton.core.cluster.placement import Rejection
from baton.core.errors import Code, Failure, Reason
from baton.core.ids import JobId
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, stream_events
from tests.unit.gateway.fakes import StubWorker, answer_to, until

PD = (("p0", "prefill"), ("d0", "decode"))
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
HELLO_PROMPT = b"user: hello\nassistant: "


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway(*PD) as g:
        yield g


@pytest.fixture
async def client(gateway: HttpGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def read_all(stream: Any, texts: list[str]) -> None:
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 - the list must survive an exception


# The OpenAI client.


async def test_openai_client_streams_a_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo",
        messages=HELLO["messages"],
        max_completion_tokens=10,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.encode() == answer_to(HELLO_PROMPT, 10)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        len(HELLO_PROMPT),
        10,
        len(HELLO_PROMPT) + 10,
    )
    assert usage.prompt_tokens_details.cached_tokens == 4


async def test_openai_client_receives_non_streaming_responses(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="demo", messages=HELLO["messages"], max_tokens=5, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content.encode() for choice in chat.choices] == [
        answer_to(HELLO_PROMPT, 5, s) for s in range(2)
    ]
    assert chat.choices[0].message.role == "assistant"
    entries = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == chat.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 5
    assert bytes(entries[0].bytes).decode() == entries[0].token
    completion = await client.completions.create(model="demo", prompt=["one", "two"], max_tokens=4, logprobs=1)
    assert [choice.text.encode() for choice in completion.choices] == [answer_to(b"one", 4), answer_to(b"two", 4)]
    assert completion.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert completion.usage.prompt_tokens == 6
    assert completion.object == "text_completion"


async def test_openai_client_streams_completions(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="demo", prompt=list(b"ids"), max_tokens=6, n=2, stream=True, logprobs=0
    )
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is None or len(choice.logprobs.tokens) == 1
    assert {i: text.encode() for i, text in texts.items()} == {s: answer_to(b"ids", 6, s) for s in range(2)}


async def test_openai_client_raises_the_error_class_of_each_status(
    client: openai.AsyncOpenAI, gateway: HttpGateway
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="demo", messages=[])
    assert bad.value.param == "messages"
    assert bad.value.request_id is not None
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=HELLO["messages"])
    assert missing.value.code == "model_not_found"
    gateway.cluster.scheduler.answer = lambda _: Rejection(reason=Reason.NO_CAPACITY, message="full", retry_after_s=2.2)
    with pytest.raises(openai.RateLimitError) as busy:
        await client.chat.completions.create(model="demo", messages=HELLO["messages"])
    assert busy.value.response.headers["retry-after"] == "3"


async def test_openai_client_raises_an_error_within_a_stream(client: openai.AsyncOpenAI, gateway: HttpGateway) -> None:
    d0 = gateway.cluster.scheduler.workers[1]
    failure = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="the logits are not finite")

    def fail(worker: StubWorker, job: JobId, _sample: int, index: int) -> None:
        if index == 3:
            worker.fail_now(job, failure)

    d0.before_token = fail
    stream = await client.chat.completions.create(model="demo", messages=HELLO["messages"], max_tokens=8, stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="not finite") as error:
        await read_all(stream, texts)
    assert "".join(texts).encode() == answer_to(HELLO_PROMPT, 3)
    assert error.value.code == "numerical_error"


async def test_openai_client_lists_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).owned_by == "baton"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


# Fields and routes beyond the OpenAI API.


async def test_response_contains_request_id_timeline_and_token_ids(gateway: HttpGateway) -> None:
    answer = await gateway.post(
        COMPLETIONS, {"prompt": "hi", "max_tokens": 3, "timeline": True, "return_token_ids": True}
    )
    body = answer.json()
    assert answer.headers["x-request-id"] == body["baton"]["request_id"] == body["id"].removeprefix("cmpl-")
    assert (body["baton"]["prefill"], body["baton"]["decode"]) == (
        {"worker_id": "p0", "pid": 1},
        {"worker_id": "d0", "pid": 2},
    )
    assert (body["baton"]["kv_bytes"], body["baton"]["transport"], body["baton"]["attempts"]) == (
        640,
        "shared-memory",
        1,
    )
    prefilled, decoded = body["baton"]["legs"]
    assert "decode_s" not in prefilled, "steps that a leg did not run are absent, not zero"
    assert decoded["decode_s"] == 1.0
    assert body["baton"]["cached_tokens_by_tier"] == {"device": 4}
    assert 0 < body["baton"]["placed_s"] <= body["baton"]["ttft_s"] < body["baton"]["total_s"]
    assert body["baton"]["waiting_s"] == 0.0
    assert not {"predicted_ttft_s", "predicted_tpot_s"} & body["baton"].keys(), (
        "predictions that were not made are absent"
    )
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == list(b"hi")
    assert bytes(choice["token_ids"]) == answer_to(b"hi", 3)


async def test_stream_contains_token_ids_and_timeline(gateway: HttpGateway) -> None:
    events = await stream_events(
        gateway, COMPLETIONS, {"prompt": "hi", "max_tokens": 3, "return_token_ids": True, "timeline": True}
    )
    assert events[0]["choices"][0]["prompt_token_ids"] == list(b"hi")
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:-1])
    assert bytes(i for event in events[:-1] for i in event["choices"][0]["token_ids"]) == answer_to(b"hi", 3)
    assert events[-1]["baton"]["prefill"]["worker_id"] == "p0"
    assert events[-1]["usage"]["completion_tokens"] == 3
    events = await stream_events(gateway, CHAT, HELLO | {"max_tokens": 3, "return_token_ids": True})
    assert events[0]["prompt_token_ids"] == list(HELLO_PROMPT)
    assert "prompt_token_ids" not in events[1]
    several = (await gateway.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2, "timeline": True})).json()
    assert [one["prefill"]["worker_id"] for one in several["baton"]["requests"]] == ["p0", "p0"]


async def test_tokenize_and_detokenize_are_inverse(gateway: HttpGateway) -> None:
    tokens = (await gateway.post("/tokenize", {"prompt": "né"})).json()
    assert tokens == {"count": 3, "max_model_len": 1024, "tokens": list("né".encode())}
    assert (await gateway.post("/tokenize", HELLO)).json()["tokens"] == list(HELLO_PROMPT)
    assert (await gateway.post("/detokenize", {"tokens": tokens["tokens"] + [511]})).json() == {"prompt": "né\ufffd"}
    assert (await gateway.post("/detokenize", {"tokens": [512]})).status_code == 400
    assert (await gateway.post("/tokenize", {"prompt": "x", "messages": []})).status_code == 400


async def test_streamed_chunks_contain_whole_characters(gateway: HttpGateway) -> None:
    text = "a\u00e9\u20ac\U0001f600\u4e2d!".encode()
    for worker in gateway.cluster.scheduler.workers:
        worker.token_at = lambda _prompt, _sample, index: text[index % len(text)]
    events = await stream_events(gateway, CHAT, HELLO | {"max_tokens": len(text)})
    texts = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(texts) == text.decode()
    assert "\ufffd" not in "".join(texts)
    # This response ends within a character.
    events = await stream_events(gateway, CHAT, HELLO | {"max_tokens": len(text) - 2})
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text[:-2].decode(errors="replace")


async def test_health_readiness_metrics_and_unknown_routes(gateway: HttpGateway) -> None:
    assert (await gateway.client.get("/health")).json() == {"status": "ok"}
    ready = await gateway.client.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    await gateway.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 3})
    await gateway.post(COMPLETIONS, {"prompt": ""})
    metrics = (await gateway.client.get("/metrics")).text
    assert 'baton_requests_total{code="200",endpoint="completions",reason=""} 1.0' in metrics
    assert 'baton_requests_total{code="400",endpoint="completions",reason="invalid_request"} 1.0' in metrics
    assert "baton_output_tokens_total 3.0" in metrics
    assert "baton_ttft_seconds_count 1.0" in metrics
    missing = await gateway.client.get("/nowhere")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    wrong = await gateway.client.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["status"], wrong.headers["allow"]) == (405, 405, "POST")
    assert (await gateway.client.head("/health")).status_code == 200


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ],
)
async def test_decision_is_found_by_the_id_of_the_response(
    gateway: HttpGateway, endpoint: str, body: dict[str, Any]
) -> None:
    answer = await gateway.post(endpoint, body)
    found = await gateway.client.get(f"/debug/decisions/{answer.json()['id']}")
    assert found.status_code == 404, "the id is understood; this scheduler keeps no records"


async def test_unknown_or_invalid_decision_id_is_rejected(gateway: HttpGateway) -> None:
    assert (await gateway.client.get("/debug/decisions/last")).status_code == 404
    for malformed in ("nothex", "other-" + "00" * 16):
        assert (await gateway.client.get(f"/debug/decisions/{malformed}")).status_code == 400


@pytest.mark.fault("F-9")
async def test_role_without_workers_is_a_503_with_retry_after_until_one_is_back(gateway: HttpGateway) -> None:
    lost = gateway.cluster.scheduler.workers[1]
    lost.die()
    gateway.cluster.scheduler.remove(lost)
    refused = await gateway.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 3})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_workers")
    assert int(refused.headers["retry-after"]) >= 1
    gateway.cluster.worker("d0", "decode", epoch=2)
    await until(lambda: gateway.cluster.gateway.health.is_ready)
    answer = (await gateway.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 3})).json()
    assert answer["choices"][0]["text"].encode() == answer_to(b"hi", 3)


async def test_gateway_without_a_decode_worker_is_not_ready(gateway: HttpGateway) -> None:
    gateway.cluster.scheduler.remove(gateway.cluster.scheduler.workers[1])
    await until(lambda: not gateway.cluster.gateway.health.is_ready)
    ready = await gateway.client.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["reasons"] == ["cluster: no decode worker is ready"]
    assert (await gateway.client.get("/health")).status_code == 200
