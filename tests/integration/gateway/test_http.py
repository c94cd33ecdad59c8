"""The HTTP API over a real server on loopback: JSON shapes, statuses, limits and misbehaving clients."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from baton.core.cluster.placement import Rejection
from baton.core.errors import Code, Failure, Reason
from baton.core.ids import JobId
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, request_bytes
from tests.invalid_requests import INVALID_JSON, WRONG_CONTENT_TYPES
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


async def events_of(gateway: HttpGateway, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await gateway.post(path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, end = answer.text.split("\n\n")
    assert end == ""
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


async def settled(gateway: HttpGateway) -> None:
    """Wait until no worker runs a job, that is, until all cancels have arrived."""
    service, workers = gateway.cluster.gateway, gateway.cluster.scheduler.workers
    await until(lambda: not service.num_open and not any(worker.open_jobs for worker in workers))


async def read_all(stream: Any, pieces: list[str]) -> None:
    async for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 - kept when the stream fails


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


async def test_openai_client_gets_non_streaming_responses(client: openai.AsyncOpenAI) -> None:
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


async def test_openai_client_raises_our_errors(client: openai.AsyncOpenAI, gateway: HttpGateway) -> None:
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
    pieces: list[str] = []
    with pytest.raises(openai.APIError, match="not finite") as error:
        await read_all(stream, pieces)
    assert "".join(pieces).encode() == answer_to(HELLO_PROMPT, 3)
    assert error.value.code == "numerical_error"


async def test_openai_client_lists_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).owned_by == "baton"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


# Baton's additions.


async def test_request_id_timeline_and_token_ids(gateway: HttpGateway) -> None:
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
    assert "decode_s" not in prefilled, "what a leg did not do is absent, not zero"
    assert decoded["decode_s"] == 1.0
    assert body["baton"]["cached_tokens_by_tier"] == {"device": 4}
    assert 0 < body["baton"]["placed_s"] <= body["baton"]["ttft_s"] < body["baton"]["total_s"]
    assert body["baton"]["waiting_s"] == 0.0
    assert not {"predicted_ttft_s", "predicted_tpot_s"} & body["baton"].keys(), "what was not predicted is absent"
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == list(b"hi")
    assert bytes(choice["token_ids"]) == answer_to(b"hi", 3)


async def test_streamed_token_ids_and_timeline(gateway: HttpGateway) -> None:
    events = await events_of(
        gateway, COMPLETIONS, {"prompt": "hi", "max_tokens": 3, "return_token_ids": True, "timeline": True}
    )
    assert events[0]["choices"][0]["prompt_token_ids"] == list(b"hi")
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:-1])
    assert bytes(i for event in events[:-1] for i in event["choices"][0]["token_ids"]) == answer_to(b"hi", 3)
    assert events[-1]["baton"]["prefill"]["worker_id"] == "p0"
    assert events[-1]["usage"]["completion_tokens"] == 3
    events = await events_of(gateway, CHAT, HELLO | {"max_tokens": 3, "return_token_ids": True})
    assert events[0]["prompt_token_ids"] == list(HELLO_PROMPT)
    assert "prompt_token_ids" not in events[1]
    several = (await gateway.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2, "timeline": True})).json()
    assert [one["prefill"]["worker_id"] for one in several["baton"]["requests"]] == ["p0", "p0"]


async def test_tokenize_and_detokenize(gateway: HttpGateway) -> None:
    tokens = (await gateway.post("/tokenize", {"prompt": "né"})).json()
    assert tokens == {"count": 3, "max_model_len": 1024, "tokens": list("né".encode())}
    assert (await gateway.post("/tokenize", HELLO)).json()["tokens"] == list(HELLO_PROMPT)
    assert (await gateway.post("/detokenize", {"tokens": tokens["tokens"] + [511]})).json() == {"prompt": "né\ufffd"}
    assert (await gateway.post("/detokenize", {"tokens": [512]})).status_code == 400
    assert (await gateway.post("/tokenize", {"prompt": "x", "messages": []})).status_code == 400


async def test_characters_are_never_split(gateway: HttpGateway) -> None:
    text = "a\u00e9\u20ac\U0001f600\u4e2d!".encode()
    for worker in gateway.cluster.scheduler.workers:
        worker.token_at = lambda _prompt, _sample, index: text[index % len(text)]
    events = await events_of(gateway, CHAT, HELLO | {"max_tokens": len(text)})
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == text.decode()
    assert "\ufffd" not in "".join(pieces)
    events = await events_of(
        gateway, CHAT, HELLO | {"max_tokens": len(text) - 2}
    )  # the response ends within a character
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text[:-2].decode(errors="replace")


async def test_health_ready_metrics_and_routes(gateway: HttpGateway) -> None:
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
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert (await gateway.client.head("/health")).status_code == 200


async def test_decisions_can_be_looked_up(gateway: HttpGateway) -> None:
    assert (await gateway.client.get("/debug/decisions/last")).status_code == 404
    assert (await gateway.client.get("/debug/decisions/nothex")).status_code == 400


async def test_not_ready_without_a_role(gateway: HttpGateway) -> None:
    gateway.cluster.scheduler.remove(gateway.cluster.scheduler.workers[1])
    await until(lambda: not gateway.cluster.gateway.health.is_ready)
    ready = await gateway.client.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["reasons"] == ["cluster: no decode worker is ready"]
    assert (await gateway.client.get("/health")).status_code == 200


# Bad input that only HTTP has. The fields are tested with the validator.


async def test_invalid_bodies_are_rejected(gateway: HttpGateway) -> None:
    for content, error_words in INVALID_JSON:
        answer = await gateway.post(COMPLETIONS, content=content)
        assert answer.status_code == 400, (content[:40], answer.text)
        assert error_words in answer.json()["error"]["message"], content[:40]
    assert (await gateway.client.get("/health")).status_code == 200


async def test_wrong_content_types_are_rejected(gateway: HttpGateway) -> None:
    for headers in WRONG_CONTENT_TYPES:
        answer = await gateway.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 415, headers
        assert "application/json" in answer.json()["error"]["message"]
    good = await gateway.post(
        COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": 'Application/JSON; charset="UTF-8"'}
    )
    assert good.status_code == 200


async def test_invalid_timeout_headers_are_rejected(gateway: HttpGateway) -> None:
    for text in ("0", "-1", "1.5", "abc", "", "9" * 30, "1_000"):
        answer = await gateway.post(COMPLETIONS, {"prompt": "x"}, headers={"x-baton-timeout-ms": text})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-baton-timeout-ms"), text


async def test_body_over_the_limit_is_rejected_before_it_is_read() -> None:
    async with http_gateway(*PD, max_body_bytes=10_000) as gateway:
        raw = await gateway.connect()
        await raw.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100000000\r\n\r\n"
        )
        assert (await raw.read_until(b'"status": 413')).startswith(b"HTTP/1.1 413 ")
        await raw.close()
        # If the complete body is sent, the client still gets the response, and the connection stays usable.
        for _ in range(2):
            answer = await gateway.post(COMPLETIONS, content=b"x" * 3_000_000)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert (await gateway.post(COMPLETIONS, {"prompt": "x"})).status_code == 200

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 1000

        answer = await gateway.client.post(COMPLETIONS, content=endless(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert (await gateway.post(COMPLETIONS, content=b'{"prompt": "' + b"x" * 900 + b'"}')).status_code == 200


async def test_head_over_the_limit_is_rejected(gateway: HttpGateway) -> None:
    raw = await gateway.connect()

    async def send_head() -> None:
        await raw.send(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        for _ in range(1000):
            await raw.send(b"x-header: " + b"y" * 10_000 + b"\r\n")

    with pytest.raises(OSError):  # noqa: PT011 - which one depends on what the kernel notices first
        await send_head()
    await raw.close()


# Time.


async def test_slow_heads_and_bodies_are_closed_at_the_receive_deadline() -> None:
    async with http_gateway(*PD, receive_deadline_s=0.4) as gateway:

        async def drip(data: bytes) -> bytes:
            raw = await gateway.connect()

            async def send() -> None:
                for byte in data:
                    await raw.send(bytes([byte]))
                    await asyncio.sleep(0.05)

            sending = asyncio.create_task(send())
            try:
                return await raw.read_until_closed()
            finally:
                sending.cancel()
                await asyncio.wait((sending,))
                await raw.close()

        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        body = request_bytes(COMPLETIONS, b'{"prompt": "' + b"x" * 200)
        whole = body[: body.index(b"\r\n\r\n") + 4]
        answers = await asyncio.gather(
            *[drip(head * 3) for _ in range(10)], *[_then_drip(gateway, whole, b"x" * 200) for _ in range(10)]
        )
        assert all(answer.startswith(b"HTTP/1.1 408 ") and b'"status": 408' in answer for answer in answers)
        raw = await gateway.connect()  # sends nothing at all
        assert await raw.read_until_closed() == b""
        await raw.close()
        metrics = (await gateway.client.get("/metrics")).text
        assert 'baton_requests_total{code="408",endpoint="",reason="deadline"} 10.0' in metrics, (
            "nobody knows yet what they would ask"
        )
        assert 'baton_requests_total{code="408",endpoint="completions",reason="deadline"} 10.0' in metrics
        assert 'code="499"' not in metrics
        assert (await gateway.post(COMPLETIONS, {"prompt": "x"})).status_code == 200


async def _then_drip(gateway: HttpGateway, head: bytes, body: bytes) -> bytes:
    raw = await gateway.connect()
    await raw.send(head)

    async def send() -> None:
        for byte in body:
            await raw.send(bytes([byte]))
            await asyncio.sleep(0.05)

    sending = asyncio.create_task(send())
    try:
        return await raw.read_until_closed()
    finally:
        sending.cancel()
        await asyncio.wait((sending,))
        await raw.close()


async def test_response_may_take_longer_than_the_receive_deadline() -> None:
    async with http_gateway(*PD, receive_deadline_s=0.3) as gateway:
        gateway.cluster.scheduler.workers[1].step_s = 0.1
        async with gateway.client.stream(
            "POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 8, "stream": True}
        ) as answer:
            text = "".join([chunk async for chunk in answer.aiter_text()])
        assert text.endswith("data: [DONE]\n\n")


async def test_connection_stays_open_after_a_streamed_response() -> None:
    """The timeout for unread responses must not close a connection whose response was read."""
    async with http_gateway(("h0", "hybrid"), receive_deadline_s=1.0) as gateway:
        gateway.cluster.scheduler.workers[
            0
        ].tokens_a_step = 8  # so that the response and the call end in the same event loop iteration
        raw = await gateway.connect()
        for number in range(1, 3):
            await raw.send(request_bytes(COMPLETIONS, b'{"prompt": "x", "max_tokens": 3, "stream": true}'))
            async with asyncio.timeout(20):
                while raw.seen.count(b"[DONE]") < number:
                    raw.seen += await raw.reader.read(65536)
            await asyncio.sleep(1.2)
            assert not raw.reader.at_eof()
        await raw.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_before_the_first_token_returns_504(gateway: HttpGateway, stream: bool) -> None:
    gateway.cluster.scheduler.workers[0].prefill_s = 10
    gateway.cluster.scheduler.workers[1].prefill_s = 10
    answer = await gateway.post(COMPLETIONS, {"prompt": "x", "stream": stream}, headers={"x-baton-timeout-ms": "150"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
    await settled(gateway)


async def test_deadline_within_a_stream_sends_an_error_event_without_done(gateway: HttpGateway) -> None:
    gateway.cluster.scheduler.workers[1].step_s = 0.1
    answer = await gateway.post(
        COMPLETIONS, {"prompt": "x", "max_tokens": 500, "stream": True}, headers={"x-baton-timeout-ms": "1500"}
    )
    assert answer.status_code == 200
    *_, last, end = answer.text.split("\n\n")
    assert (last.split("\n")[0], end) == ("event: error", "")
    error = json.loads(last.split("\n")[1].removeprefix("data: "))["error"]
    assert (error["status"], error["code"], error["type"]) == (504, "deadline", "timeout_error")
    await settled(gateway)


# Clients that disconnect or do not read.


@pytest.mark.parametrize("phase", ["queued", "prefill", "stream", "whole"])
async def test_disconnect_cancels_the_request_on_all_workers(gateway: HttpGateway, phase: str) -> None:
    p0, d0 = gateway.cluster.scheduler.workers
    p0.prefill_s = d0.prefill_s = 30 if phase == "prefill" else 0.01
    gateway.cluster.scheduler.hangs = phase == "queued"
    d0.step_s = 0.05
    raw = await gateway.connect()
    body = {"prompt": "x", "max_tokens": 500, "stream": phase != "whole"}
    await raw.send(request_bytes(COMPLETIONS, json.dumps(body).encode()))
    if phase == "stream":
        await raw.read_until(b"data: ")
    else:
        await until(lambda: gateway.cluster.gateway.num_open)
        await until(lambda: phase == "queued" or d0.jobs)
    assert gateway.cluster.gateway.num_open == 1
    await raw.close()
    await settled(gateway)
    if phase != "queued":
        assert {cancel.reason for cancel in d0.cancels} == {Reason.CANCELLED}
    gateway.cluster.scheduler.hangs = False
    metrics = (await gateway.client.get("/metrics")).text
    assert 'baton_requests_total{code="499",endpoint="completions",reason="cancelled"} 1.0' in metrics


async def test_slow_reader_is_cancelled_without_effect_on_others() -> None:
    async with http_gateway(*PD, stream_buffer_bytes=16 * 1024) as gateway:
        p0, d0 = gateway.cluster.scheduler.workers
        for worker in (p0, d0):
            worker.report = replace(worker.report, max_model_len=10**6)
            worker.token_at = lambda _prompt, _sample, _index: 97
        gateway.cluster.scheduler.publish()
        d0.step_s, d0.tokens_a_step = 0.001, 500
        await asyncio.sleep(0.3)
        raw = await gateway.connect()
        body = {"prompt": "x", "max_tokens": 900_000, "stream": True, "return_token_ids": True, "n": 4}
        await raw.send(request_bytes(COMPLETIONS, json.dumps(body).encode()))
        await until(lambda: d0.cancels, timeout_s=10)
        assert {cancel.reason for cancel in d0.cancels} == {Reason.SLOW_READER}
        await settled(gateway)
        assert b"[DONE]" not in await raw.read_until_closed()
        await raw.close()
        d0.step_s, d0.tokens_a_step = 0.01, 1
        assert (await gateway.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5})).status_code == 200


async def test_several_requests_on_one_connection(gateway: HttpGateway) -> None:
    raw = await gateway.connect()
    one = request_bytes(COMPLETIONS, b'{"prompt": "a", "max_tokens": 3}')
    await raw.send(one + one + one[:50])
    await raw.read_until(b'"finish_reason": "length"')
    await asyncio.sleep(0.3)
    await raw.send(one[50:])
    async with asyncio.timeout(20):
        while raw.seen.count(b"HTTP/1.1 200") < 3 or raw.seen.count(b'"usage"') < 3:
            raw.seen += await raw.reader.read(65536)
    await raw.close()


# Draining and overload.


async def test_draining_gateway_finishes_streams_and_rejects_new_requests(gateway: HttpGateway) -> None:
    gateway.cluster.scheduler.workers[1].step_s = 0.05
    stream = asyncio.create_task(events_of(gateway, COMPLETIONS, {"prompt": "x", "max_tokens": 40}))
    await until(lambda: gateway.cluster.scheduler.workers[1].jobs)
    drained = asyncio.create_task(gateway.cluster.gateway.drain(5.0))
    await asyncio.sleep(0)
    ready, health = await gateway.client.get("/ready"), await gateway.client.get("/health")
    assert (ready.status_code, ready.json()["reasons"], health.status_code) == (503, ["draining"], 200)
    refused = await gateway.post(COMPLETIONS, {"prompt": "y"})
    assert (refused.status_code, refused.json()["error"]["code"], refused.headers["connection"]) == (
        503,
        "draining",
        "close",
    )
    assert refused.headers["retry-after"] == "1"
    assert not drained.done()
    assert len(await stream) == 40
    await drained


async def test_requests_above_the_limit_of_open_requests_are_rejected() -> None:
    async with http_gateway(*PD, max_open_requests=2) as gateway:
        gateway.cluster.scheduler.workers[1].step_s = 0.2
        running = [asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "x", "max_tokens": 8})) for _ in range(2)]
        await until(lambda: gateway.cluster.gateway.num_open == 2)
        refused = await gateway.post(COMPLETIONS, {"prompt": "y"})
        assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (
            429,
            "queue_full",
            "1",
        )
        assert [(await answer).status_code for answer in running] == [200, 200]


async def test_failure_of_one_prompt_fails_the_call(gateway: HttpGateway) -> None:
    failure = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="nan")
    gateway.cluster.scheduler.workers[1].fail_job = lambda job: failure if bytes(job.token_ids) else None
    gateway.cluster.scheduler.workers[0].prefill_s = 1.0
    answer = await gateway.post(COMPLETIONS, {"prompt": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "numerical_error")
    await settled(gateway)


async def test_responses_are_not_delayed_by_nagles_algorithm(gateway: HttpGateway) -> None:
    """Nagle's algorithm with delayed acknowledgements would add 40 ms on a reused connection."""
    await gateway.client.get("/health")
    sockets = [connection.transport.get_extra_info("socket") for connection in gateway.server.connections]
    assert sockets
    assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in sockets)
