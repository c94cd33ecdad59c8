"""`openai` and `anthropic`: strict validation of every response and event, and the fields of their requests.

The clients themselves build models without validation, so a field that is missing or of another type would
not be noticed.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import httpx
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from common import KEY, QUESTION, URL
from openai.types import Completion, Model
from openai.types import completion_create_params as completions
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chats
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses import response_create_params as responses
from pydantic import TypeAdapter
from typing_extensions import is_typeddict

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
client = httpx.Client(base_url=URL, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "d", "parameters": SCHEMA}
FLAT_TOOL = {"type": "function", **FUNCTION}
USER = [{"role": "user", "content": QUESTION}]
REQUESTS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    (CHAT, ChatCompletion, ChatCompletionChunk, body | {"messages": USER, "max_tokens": 60})
    for body in (
        {"logprobs": True, "top_logprobs": 2, "n": 2, "stop": ["."], "stream_options": {"include_usage": True}},
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
        {"functions": [FUNCTION], "function_call": {"name": "get_weather"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    )
]
REQUESTS.append((COMPLETIONS, Completion, None, {"prompt": ["import os", "def f("], "max_tokens": 3, "logprobs": 1}))
REQUESTS += [
    (RESPONSES, Response, ResponseStreamEvent, body | {"input": QUESTION, "max_output_tokens": 60})
    for body in (
        {"include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}, "metadata": {"a": "b"}},
        {"tools": [FLAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "instructions": "Answer."},
    )
]
REQUESTS += [
    (MESSAGES, Message, RawMessageStreamEvent, body | {"messages": USER, "max_tokens": 60})
    for body in (
        {"stop_sequences": ["."], "system": "Answer."},
        {"tools": [{"name": "get_weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    )
]


adapter_of = functools.cache(TypeAdapter)


def check(model: Any, value: Any) -> None:
    """Raise ValidationError unless a JSON value is valid for a model without conversions."""
    adapter_of(model).validate_json(json.dumps(value), strict=True)


def events(path: str, body: dict[str, Any]) -> Iterator[Any]:
    """Yield the data of a stream's events, read as a client without a library does."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            assert line == "" or line.startswith(("event: ", "data: ")), line
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def responses_are_valid() -> None:
    """Every answer, and every event, has all fields of the client's model with their types."""
    for path, model, event, body in REQUESTS:
        answer = client.post(path, json={name: value for name, value in body.items() if name != "stream_options"})
        assert answer.status_code == 200, (body, answer.text)
        check(model, answer.json())
        if event is None:
            continue
        streamed = list(events(path, body))
        for each in streamed:
            check(event, each)
        if path == RESPONSES:
            check_items(streamed)
    check(MessageTokensCount, client.post(f"{MESSAGES}/count_tokens", json={"messages": USER}).json())
    for model in (Model, ModelInfo):
        check(model, client.get("/v1/models/demo").json())


def check_items(streamed: list[Any]) -> None:
    """Check that ids, indexes and numbers of a response's events belong together, and that its deltas join to
    the items of the last event."""
    assert [each["sequence_number"] for each in streamed] == list(range(len(streamed)))
    final = streamed[-1]["response"]["output"]
    texts = [""] * len(final)
    for each in streamed:
        if "output_index" in each:
            item = final[each["output_index"]]
            assert each.get("item_id", item["id"]) == item["id"]
            assert each.get("item", item)["id"] == item["id"]
            texts[each["output_index"]] += each.get("delta", "")
    assert texts == [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in final]
    done = [each["item"] for each in streamed if each["type"] == "response.output_item.done"]
    assert done == final


def fields_of(kind: Any) -> set[str]:
    """Return the names of a request's fields."""
    return set(get_type_hints(kind)) - {"user_profile_id", "workspace_id"}  # these two are headers


def parts_of(kind: Any, name: str) -> list[Any]:
    """Return the TypedDicts that a field of a request, or each item of it, may be."""

    def found(each: Any) -> Iterator[Any]:
        if is_typeddict(each):
            yield each
        else:
            for argument in get_args(each):
                yield from found(argument)

    return list(found(get_type_hints(kind)[name]))


def request_fields_are_known() -> None:
    """The OpenAPI document has each field that clients may send: read, without effect, or refused by name."""
    paths = client.get("/openapi.json").json()["paths"]
    for path, kind in (
        (CHAT, chats.CompletionCreateParamsNonStreaming),
        (COMPLETIONS, completions.CompletionCreateParamsNonStreaming),
        (RESPONSES, responses.ResponseCreateParamsNonStreaming),
        (MESSAGES, MessageCreateParamsNonStreaming),
        (f"{MESSAGES}/count_tokens", MessageCountTokensParams),
    ):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        missing = fields_of(kind) - schema["properties"].keys()
        assert not missing, (path, missing)
        for name, field in schema["properties"].items():
            nested = [each for each in field.get("anyOf", ()) if "properties" in each]
            if nested and name in get_type_hints(kind):
                (part, *others) = parts_of(kind, name)
                if not others:  # of several kinds of objects, the table only has those that are implemented
                    missing = fields_of(part) - nested[0]["properties"].keys()
                    assert not missing, (path, name, missing)


responses_are_valid()
request_fields_are_known()
