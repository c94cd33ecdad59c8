"""`/v1/responses` and `/v1/messages` over a real server on loopback."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from baton.core.errors import Code, Failure, Reason
from baton.core.request_limits import MAX_JSON_CONTAINERS
from baton.gateway.http.http_exchange import IGNORED_FIELDS_HEADER
from baton.runtime.process.byte_budget import Account
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, request_bytes
from tests.integration.gateway.test_api_keys import ALICE, key_ring
from tests.integration.gateway.test_bounded_output import make_fast
from tests.integration.gateway.test_chat_messages import ARGUMENTS, FAMILIES, TOOL, gateway_of
from tests.loop_cpu import repeated_longest_turn_s
from tests.scripted_chats import write
from tests.unit.gateway.fakes import answer_to, until

pytestmark = pytest.mark.integration
PD = (("p0", "prefill"), ("d0", "decode"))
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
PROMPT = b"system: Answer.\nuser: hello\nassistant: "
RESPONSE = {"input": "hello", "instructions": "Answer.", "max_output_tokens": 10}
MESSAGE = {"messages": [{"role": "user", "content": "hello"}], "system": "Answer.", "max_tokens": 10}
LARGEST_TURN_S = 0.05


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway(*PD) as g:
        yield g


async def events_of(gateway: HttpGateway, path: str, body: dict[str, Any]) -> list[Any]:
    """Stream a response. Returns its events, whose names are on their lines."""
    answer = await gateway.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *texts, end = answer.text.split("\n\n")
    assert end == ""
    events = []
    for text in texts:
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_openai_client_creates_and_streams_responses(gateway: HttpGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.responses.create(model="demo", **RESPONSE)
        assert whole.output_text.encode() == answer_to(PROMPT, 10)
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (whole.instructions, whole.tools, whole.store) == ("Answer.", [], False)
        usage = whole.usage
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(PROMPT), 10, len(PROMPT) + 10)
        assert usage.input_tokens_details.cached_tokens == 4
        events = [event async for event in await client.responses.create(model="demo", **RESPONSE, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.id.startswith("resp_")


async def test_message_and_its_events_have_the_same_content(gateway: HttpGateway) -> None:
    answer = await gateway.post(MESSAGES, MESSAGE, headers={"anthropic-version": "2023-06-01"})
    message = answer.json()
    assert answer.headers["x-request-id"] == message["id"].removeprefix("msg_")
    text = answer_to(PROMPT, 10).decode()
    assert message["content"] == [{"type": "text", "text": text}]
    assert (message["role"], message["stop_reason"], message["model"]) == ("assistant", "max_tokens", "demo")
    assert (message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"]) == (len(PROMPT) - 4, 4)
    events = await events_of(gateway, MESSAGES, MESSAGE)
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == text
    assert events[-2]["usage"] == message["usage"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    counted = await gateway.post(COUNT, {name: MESSAGE[name] for name in ("messages", "system")})
    assert counted.json() == {"input_tokens": len(PROMPT)}


async def test_message_of_no_tokens_only_fills_the_prefix_cache(gateway: HttpGateway) -> None:
    message = (await gateway.post(MESSAGES, {**MESSAGE, "max_tokens": 0})).json()
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(PROMPT)
    assert usage["output_tokens"] == 0
    events = await events_of(gateway, MESSAGES, {**MESSAGE, "max_tokens": 0})
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
    refused = await gateway.post("/v1/chat/completions", {"messages": MESSAGE["messages"], "max_tokens": 0})
    assert refused.json()["error"]["message"] == "max_tokens is 0; must be at least 1"


async def test_stop_sequence_is_named(gateway: HttpGateway) -> None:
    text = answer_to(PROMPT, 10).decode()
    stop = text[4:6]
    message = (await gateway.post(MESSAGES, {**MESSAGE, "stop_sequences": ["zzz", stop]})).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]
    events = await events_of(gateway, MESSAGES, {**MESSAGE, "stop_sequences": [stop]})
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


async def test_logprobs_of_a_response_are_those_of_its_tokens(gateway: HttpGateway) -> None:
    body = {**RESPONSE, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    content = (await gateway.post(RESPONSES, body)).json()["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in content["logprobs"]) == content["text"]
    assert [len(entry["top_logprobs"]) for entry in content["logprobs"]] == [2] * 10


@pytest.mark.parametrize("tokens_a_step", [1, 3, 64])
async def test_logprobs_of_a_message_are_without_those_of_reasoning_and_delimiters(tokens_a_step: int) -> None:
    """However many tokens arrive together, and if the reasoning is left out, too."""
    body = {"input": "hi", "top_logprobs": 1, "chat_template_kwargs": {"enable_thinking": True}}
    text = "I hide it: Zürich."
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, f"<think>\nI hide it: Zürich.\n</think>\n\n{text}<|im_end|>")
        for worker in gateway.cluster.scheduler.workers:
            worker.tokens_a_step = tokens_a_step
        for fields in ({}, {"include_reasoning": False}):
            whole = (await gateway.post(RESPONSES, body | fields)).json()["output"][-1]["content"][0]
            events = await events_of(gateway, RESPONSES, body | fields)
            streamed = [entry for event in events if "delta" in event for entry in event.get("logprobs", ())]
            for logprobs in (whole["logprobs"], streamed):
                written = [byte for entry in logprobs for byte in entry["bytes"]]
                assert bytes(written).decode().removesuffix("<|im_end|>") == whole["text"] == text


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {**RESPONSE, "max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {**RESPONSE, "temperature": 3}, "temperature"),
        (RESPONSES, {**RESPONSE, "store": True}, "store"),
        (RESPONSES, {**RESPONSE, "tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        (MESSAGES, {**MESSAGE, "max_tokens": -1}, "max_tokens"),
        (MESSAGES, {**MESSAGE, "stop_sequences": [""]}, "stop_sequences"),
        (MESSAGES, {**MESSAGE, "tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        (COUNT, {"messages": []}, "messages"),
        (RESPONSES, {**RESPONSE, "kv_transfer_params": {}}, "kv_transfer_params"),
        (RESPONSES, {**RESPONSE, "tool_choice": {**ALLOWED, "mode": "any"}}, "tool_choice.mode"),
        (RESPONSES, {**RESPONSE, "tool_choice": ALLOWED}, "tool_choice.tools[0]"),
        (MESSAGES, {**MESSAGE, "kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
async def test_invalid_field_is_refused_in_the_form_of_the_api(
    gateway: HttpGateway, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await gateway.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)
    if path == RESPONSES:
        assert error["param"] == param
    else:
        assert answer.json()["type"] == "error"
        assert error.keys() == {"type", "message"}


async def test_prompt_that_is_too_long_names_the_field_that_has_it(gateway: HttpGateway) -> None:
    messages = [{"role": "user", "content": "x" * 2000}]
    for path, body, param in (
        (RESPONSES, {"input": "x" * 2000}, "input"),
        ("/v1/chat/completions", {"messages": messages}, "messages"),
        ("/v1/completions", {"prompt": "x" * 2000}, "prompt"),
    ):
        error = (await gateway.post(path, body)).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert error["message"].endswith(f"shorten {param}")
        assert "max" not in error["message"].replace("maximum", "")
    for path, body, name in (
        (RESPONSES, {**RESPONSE, "max_output_tokens": 2000}, "max_output_tokens"),
        (MESSAGES, {**MESSAGE, "max_tokens": 2000}, "max_tokens"),
    ):
        message = (await gateway.post(path, body)).json()["error"]["message"]
        assert re.match(rf"input length and `{name}` exceed context limit: \d+ \+ 2000 > \d+;", message)


async def test_other_errors_of_messages_have_their_types(gateway: HttpGateway) -> None:
    for path in (MESSAGES, COUNT):
        answer = await gateway.post(path, {**MESSAGE, "model": "other"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
        answer = await gateway.client.get(path)
        assert (answer.status_code, answer.json()["type"], answer.headers["allow"]) == (405, "error", "POST")
        assert answer.json()["request_id"] == answer.headers["request-id"]
        answer = await gateway.post(path, content=b" " * (8 * 2**20 + 1))
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


async def test_paths_that_do_not_exist_say_why_in_the_form_of_their_api(gateway: HttpGateway) -> None:
    answer = await gateway.client.get("/v1/messages/batches")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert "batches are not implemented" in answer.json()["error"]["message"]
    error = (await gateway.client.get("/v1/responses/resp_1")).json()["error"]
    assert (error["status"], error["code"]) == (404, "invalid_request")
    assert "responses are not stored" in error["message"]
    error = (await gateway.post("/v1/responses/input_tokens", {"input": "hi"})).json()["error"]
    assert (error["status"], "/tokenize" in error["message"]) == (404, True)


async def test_thread_is_refused_so_that_the_tool_runner_goes_on_without_one(gateway: HttpGateway) -> None:
    answer = await gateway.post(MESSAGES, {**MESSAGE, "thread": {"type": "create"}})
    assert answer.status_code == 400
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert answer.json()["error"]["details"] == details


async def test_overload_has_the_status_of_the_api_and_says_when_to_retry(gateway: HttpGateway) -> None:
    lost = gateway.cluster.scheduler.workers[1]
    lost.die()
    gateway.cluster.scheduler.remove(lost)
    for path, body, status in ((RESPONSES, RESPONSE, 503), (MESSAGES, MESSAGE, 529)):
        answer = await gateway.post(path, body)
        assert answer.status_code == status
        assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "overloaded_error"


async def test_clients_do_not_repeat_a_request_that_fails_again(gateway: HttpGateway) -> None:
    fails = Failure(code=Code.INTERNAL, reason=Reason.NUMERICAL_ERROR, message="logits are not finite")
    for worker in gateway.cluster.scheduler.workers:
        worker.fail_job = lambda _: fails
    for path, body in ((RESPONSES, RESPONSE), (MESSAGES, MESSAGE)):
        answer = await gateway.post(path, body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")


async def test_client_of_anthropic_lists_the_models(gateway: HttpGateway) -> None:
    page = (await gateway.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    (model,) = page["data"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "demo", "demo")
    assert (model["type"], model["display_name"], model["created_at"]) == ("model", "demo", "2023-11-14T22:13:20Z")


async def test_key_is_checked_before_the_body_is_read_and_may_be_in_the_header_of_anthropic() -> None:
    async with http_gateway(*PD, keys=key_ring(max_open_requests=1)) as gateway:
        for path in (RESPONSES, MESSAGES, COUNT):
            for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ALICE, "authorization": "Bearer wrong"}):
                answer = await gateway.client.post(path, headers=headers, content=b"{no json")
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        for headers in ({"x-api-key": ALICE}, {"authorization": f"Bearer {ALICE}"}):
            assert (await gateway.post(MESSAGES, MESSAGE, headers=headers)).status_code == 200
            assert (await gateway.post(COUNT, MESSAGE, headers=headers)).status_code == 200
            assert (await gateway.post(RESPONSES, RESPONSE, headers=headers)).status_code == 200


async def test_results_are_counted_by_endpoint_and_ignored_fields_are_named(gateway: HttpGateway) -> None:
    answer = await gateway.post(RESPONSES, {**RESPONSE, "new_field": 1, "text": {"new": 1}})
    assert answer.headers[IGNORED_FIELDS_HEADER.decode()] == "new_field, text.new"
    answer = await gateway.post(MESSAGES, {**MESSAGE, "new_field": 1})
    assert answer.headers[IGNORED_FIELDS_HEADER.decode()] == "new_field"
    assert (await gateway.post(MESSAGES, {**MESSAGE, "max_tokens": None})).status_code == 400
    metrics = (await gateway.client.get("/metrics")).text
    for endpoint, code, reason in (("responses", 200, ""), ("messages", 200, ""), ("messages", 400, "invalid_request")):
        assert f'endpoint="{endpoint}",' in metrics
        assert f'code="{code}",endpoint="{endpoint}",reason="{reason}"' in metrics


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, RESPONSE), (MESSAGES, MESSAGE)])
async def test_failure_after_the_first_event_ends_the_stream_with_an_event(path: str, body: dict[str, Any]) -> None:
    async with http_gateway(*PD, max_attempts=1) as gateway:
        worker = gateway.cluster.scheduler.workers[1]
        worker.step_s = 0.01
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        raw = await gateway.connect()
        await raw.send(request_bytes(path, json.dumps({**body, limit: 90, "stream": True}).encode()))
        await raw.read_until(b"delta")
        worker.die()
        text = (await raw.read_until(b"\r\n0\r\n")).decode()
        await raw.close()
    last = json.loads(text.split("data: ")[-1].split("\r\n")[0])
    if path == RESPONSES:
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
        assert last["response"]["output"][0]["content"][0]["text"]
    else:
        assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_size_of_a_response_is_checked_at_admission_even_if_it_is_streamed(stream: bool) -> None:
    async with http_gateway(*PD, max_response_bytes=1000) as gateway:
        answer = await gateway.post(RESPONSES, {**RESPONSE, "max_output_tokens": 90, "stream": stream})
        assert answer.status_code == 400
        assert "lower n, max_tokens" in answer.json()["error"]["message"]
        assert not gateway.cluster.scheduler.queries


async def test_memory_is_free_after_a_response_and_after_a_client_that_left(gateway: HttpGateway) -> None:
    budget = gateway.cluster.gateway.budget
    gateway.cluster.scheduler.workers[1].step_s = 0.01
    for path, body in ((RESPONSES, RESPONSE), (MESSAGES, MESSAGE)):
        await events_of(gateway, path, body)
        raw = await gateway.connect()
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        await raw.send(request_bytes(path, json.dumps({**body, limit: 90, "stream": True}).encode()))
        await raw.read_until(b"delta")
        await raw.close()
        await until(lambda: not gateway.cluster.gateway.num_open)
        await until(lambda: not any(budget.used(account) for account in (Account.REQUESTS, Account.UNSENT)))


async def test_response_that_is_never_read_loses_its_connection_and_its_memory() -> None:
    async with http_gateway(*PD, unread_s=1.0, send_buffer_bytes=2**16) as gateway:
        await make_fast(gateway)
        gateway.cluster.scheduler.workers[1].tokens_a_step = 1_000
        raw = await gateway.connect()
        fields = {"max_output_tokens": 20_000, "include": ["message.output_text.logprobs"], "stream": True}
        await raw.send(request_bytes(RESPONSES, json.dumps({"input": "x", **fields}).encode()))
        await until(lambda: gateway.cluster.scheduler.actuals, timeout_s=60)
        await until(lambda: not gateway.server.connections, timeout_s=30)
        budget = gateway.cluster.gateway.budget
        await until(lambda: not any(budget.used(account) for account in (Account.REQUESTS, Account.UNSENT)))
        await raw.close()


LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "items": (RESPONSES, {"input": [{"role": "user", "content": "x"}] * (MAX_JSON_CONTAINERS - 100)}),
    "parts": (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 4096}] * 7}),
    "instructions": (RESPONSES, {"input": "x", "instructions": "word " * 1_500_000}),
    "tools": (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f", "description": "d"}] * 10_000}),
    "tool result": (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "word " * 1_500_000},
            ]
        },
    ),
    "blocks": (
        MESSAGES,
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4096}] * 7},
    ),
    "results": (
        MESSAGES,
        {
            "max_tokens": 1,
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}] * 4000},
            ],
        },
    ),
    "count": (COUNT, {"messages": [{"role": "user", "content": "x"}] * (MAX_JSON_CONTAINERS - 100)}),
}


@pytest.mark.parametrize("name", LARGE)
async def test_large_body_does_not_block_the_event_loop(gateway: HttpGateway, name: str) -> None:
    path, body = LARGE[name]
    content = json.dumps(body).encode()

    async def post() -> int:
        return (await gateway.post(path, content=content)).status_code

    longest_s, status = await repeated_longest_turn_s(post, LARGEST_TURN_S)
    assert status == 400
    assert longest_s < LARGEST_TURN_S
    await asyncio.sleep(0)
    assert not gateway.cluster.gateway.budget.used(Account.RECEIVING)


async def test_reasoning_and_calls_are_sent_back_as_they_came() -> None:
    """The prompt of the next turn is that of a chat, for both APIs, and streams have the same answer."""
    begin, call, end = FAMILIES["qwen3"]
    user = {"role": "user", "content": "hi"}
    schema = TOOL["function"]["parameters"]
    message_body = {
        "messages": [user],
        "max_tokens": 500,
        "tools": [{"name": "get_weather", "input_schema": schema}],
        "thinking": {"type": "adaptive"},
    }
    response_body = {
        "input": [user],
        "max_output_tokens": 500,
        "tools": [{"type": "function", "name": "get_weather", "parameters": schema}],
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True},
    }
    chat_tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, begin + call + end)
        gateway.cluster.scheduler.workers[1].tokens_a_step = 16
        message = (await gateway.post(MESSAGES, message_body)).json()
        assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
        assert message["content"][2]["input"] == json.loads(ARGUMENTS)
        assert message["stop_reason"] == "tool_use"
        events = await events_of(gateway, MESSAGES, message_body)
        assert "".join(e["delta"].get("partial_json", "") for e in events if "delta" in e) == ARGUMENTS
        result = {"type": "tool_result", "tool_use_id": message["content"][2]["id"], "content": "sunny"}
        turns = [user, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
        counted = (await gateway.post(COUNT, {**message_body, "messages": turns, "max_tokens": None})).json()

        response = (await gateway.post(RESPONSES, response_body)).json()
        assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
        assert response["output"][2]["arguments"] == ARGUMENTS
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] >= 2
        events = await events_of(gateway, RESPONSES, response_body)
        names = ("id", "call_id")
        assert [
            {name: value for name, value in item.items() if name not in names}
            for item in events[-1]["response"]["output"]
        ] == [{name: value for name, value in item.items() if name not in names} for item in response["output"]]
        call_id = response["output"][2]["call_id"]
        output = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
        next_body = {**response_body, "input": [user, *response["output"], output], "max_output_tokens": 1}
        following = (await gateway.post(RESPONSES, next_body)).json()

        chat = {
            "messages": [
                user,
                {
                    "role": "assistant",
                    "reasoning_content": message["content"][0]["thinking"],
                    "content": message["content"][1]["text"],
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "sunny"},
            ],
            "tools": [chat_tool],
            "chat_template_kwargs": {"enable_thinking": True},
        }
        tokens = (await gateway.post("/tokenize", chat)).json()
        assert following["usage"]["input_tokens"] == counted["input_tokens"] == tokens["count"]
