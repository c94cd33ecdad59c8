"""Bodies of `/v1/responses` and `/v1/messages` become chats, and errors name the fields of the client."""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import Reason
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.translations.json_echo import encode_echo
from baton.gateway.input.translations.messages_body import translate_count, translate_messages
from baton.gateway.input.translations.responses_body import translate_responses
from baton.gateway.input.translations.translated_body import TranslatedBody
from tests.scale import sized

Translate = Callable[[Mapping[str, Any], UnknownFields], TranslatedBody]
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
FLAT_TOOL = {"type": "function", **FUNCTION}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
NAMED = {"type": "function", "function": {"name": "f"}}
ANSWER_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
NO_THINKING = {"enable_thinking": False, "thinking": False}
THINKING = {"enable_thinking": True, "thinking": True}


def translated(translate: Translate, body: Mapping[str, Any], *ignored: str) -> dict[str, Any]:
    unknown = UnknownFields()
    chat = dict(translate(body, unknown).chat)
    assert unknown.names == list(ignored)
    return chat


def chat_of_input(*items: Mapping[str, Any], **fields: Any) -> list[Any]:
    messages: list[Any] = translated(translate_responses, {"input": list(items), **fields})["messages"]
    return messages


def chat_of_messages(*messages: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return translated(translate_messages, {"max_tokens": 9, "messages": list(messages), **fields})


def blocks(role: str, *content: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def text(value: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": value}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"model": "demo", "stream": True, "user": "u", "store": False}, {"model": "demo", "stream": True}),
        ({"max_output_tokens": 5, "temperature": 0.5}, {"max_tokens": 5, "temperature": 0.5}),
        ({"tools": [FLAT_TOOL], "tool_choice": "required"}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
        (
            {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
            {"tools": [CHAT_TOOL], "tool_choice": NAMED, "parallel_tool_calls": False},
        ),
        (
            {
                "tools": [{"type": "function", "name": "g"}, FLAT_TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "f"}],
                },
            },
            {
                "tools": [{"type": "function", "function": {"name": "g"}}, CHAT_TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            },
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
        ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, {}),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"truncation": "disabled", "background": False, "previous_response_id": None, "metadata": {"a": "b"}}, {}),
        ({"seed": 3, "top_k": 4, "slo": {"ttft_ms": 9}}, {"seed": 3, "top_k": 4, "slo": {"ttft_ms": 9}}),
        ({"cache_salt": "s", "bad_words": ["x"], "n": 1}, {"cache_salt": "s", "bad_words": ["x"]}),
        ({"session": "s"}, {"session": "s"}),
    ],
)
def test_fields_of_responses_become_fields_of_a_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    chat = translated(translate_responses, {"input": "hi", **fields})
    assert chat == {"messages": [USER], **expected}


def test_items_of_one_answer_become_one_message() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text("think", "reasoning_text")]}
    message = {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        **blocks("assistant", text("hm", "output_text")),
    }
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
    chat_call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    answer = {"role": "assistant", "reasoning_content": "think", "content": "hm", "tool_calls": [chat_call, chat_call]}
    assert chat_of_input(USER, reasoning, message, call, call, output) == [USER, answer, result]
    assert chat_of_input(USER, message, reasoning, message)[1:] == [
        {"role": "assistant", "content": "hm"},
        {"role": "assistant", "reasoning_content": "think", "content": "hm"},
    ]
    assert chat_of_input(USER, call, message)[1:] == [
        {"role": "assistant", "tool_calls": [chat_call]},
        {"role": "assistant", "content": "hm"},
    ]
    foreign = {"type": "reasoning", "id": "rs_2", "summary": [text("s", "summary_text")], "encrypted_content": "x"}
    assert chat_of_input(USER, foreign, message)[1:] == [{"role": "assistant", "content": "hm"}]
    parts = [text("sunny", "input_text"), text("warm", "input_text")]
    assert chat_of_input(call, {**output, "output": parts})[1]["content"] == "sunny\nwarm"


def test_instructions_and_a_system_message_after_them_are_one_message() -> None:
    developer = {"role": "developer", "content": "Be kind."}
    assert chat_of_input(developer, USER, instructions="Answer.") == [
        {"role": "system", "content": "Answer.\n\nBe kind."},
        USER,
    ]
    assert chat_of_input(developer, USER) == [developer, USER]
    assert chat_of_input(USER, developer, instructions="Answer.")[1:] == [USER, developer]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"store": True}, "store", "responses are not stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in input"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "clients may not set it"),
        ({"bootstrap_host": "h"}, "bootstrap_host", "clients may not set it"),
        ({"n": 2}, "n", "send several requests"),
        ({"max_tokens": 5}, "max_tokens", "send max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "send text.format"),
        ({"tools": [FLAT_TOOL] * 10_000}, "tools", "10000 items; at most 128"),
        ({"tools": [{**FLAT_TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "send the tools"),
        ({"input": [{**USER, "status": 5}]}, "input[0].status", "must be a string"),
        ({"conversation": "c"}, "conversation", "send the earlier items"),
        ({"background": True}, "background", "use stream"),
        ({"prompt": {"id": "p"}}, "prompt", "send the text in input"),
        ({"truncation": "auto"}, "truncation", "shorten the input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'; only function tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "'file_search'; must be 'function'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools", "is missing"),
        ({"include": ["everything"]}, "include[0]", "'everything'; must be one of"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "ask for it in instructions"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "'grammar'; must be"),
        ({"input": None}, "input", "is missing; must be a string or a list of items"),
        ({"input": [{**USER, "content": 5}]}, "input[0].content", "must be a string or a list of text parts"),
        ({"input": [USER, CALL_ITEM, {**CALL_ITEM, "name": ""}]}, "input[2].name", "between 1 and 256 characters"),
        ({"input": [USER, CALL_ITEM, {**CALL_ITEM, "call_id": "c" * 257}]}, "input[2].call_id", "257 characters"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference'; only message"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool'; must be one of user"),
        ({"input": [blocks("user", {"type": "input_image"})]}, "input[0].content[0].type", "only text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "is missing"),
        ({"instructions": "\ud800"}, "instructions", "lone surrogate"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not implemented"),
    ],
)
def test_responses_are_refused_by_the_name_of_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidField) as refused:
        translate_responses({"input": "hi", **fields}, UnknownFields())
    assert refused.value.param == param
    assert param in str(refused.value)
    assert words in str(refused.value)


def test_response_repeats_the_fields_of_its_request() -> None:
    body = {"input": "hi", "instructions": "é" * 40_000, "tools": [FLAT_TOOL], "metadata": {"a": "b"}, "top_p": 0.5}
    echo = json.loads(b"{" + encode_echo(translate_responses(body, UnknownFields()).echo) + b"}")
    assert {name: echo[name] for name in body if name != "input"} == {k: v for k, v in body.items() if k != "input"}
    assert (echo["store"], echo["text"], echo["tool_choice"]) == (False, {"format": {"type": "text"}}, "auto")
    echo = translate_responses({"input": "hi", "tools": [{"type": "function", "name": "f"}]}, UnknownFields()).echo
    assert echo["tools"] == [{"type": "function", "name": "f", "parameters": None, "strict": False}]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=sized(60, 2000), deadline=None)
@given(value=JSON_VALUES, size=st.sampled_from((0, 32_767, 32_768, 32_769)))
def test_echo_is_the_json_of_its_fields(value: Any, size: int) -> None:
    fields = {"a": value, "b": {"c": "é\n" * size}, "ids": [1] * 3}
    assert json.loads(b"{" + encode_echo({**fields, "ids": array("I", [1, 1, 1])}) + b"}") == fields


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"model": "demo", "top_k": 4, "stream": True}, {"model": "demo", "top_k": 4, "stream": True}),
        ({"stop_sequences": ["a"], "metadata": {"user_id": "u"}, "service_tier": "auto"}, {"stop": ["a"]}),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
        ({"tools": [TOOL | {"type": "custom", "cache_control": {}}]}, {"tools": [CHAT_TOOL]}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            {"tools": [CHAT_TOOL], "tool_choice": NAMED, "parallel_tool_calls": False},
        ),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"context_management": {"edits": []}, "inference_geo": "eu", "cache_control": {}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"chat_template_kwargs": THINKING}),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": THINKING}),
        ({"thinking": {"type": "disabled"}}, {}),
        ({"chat_template_kwargs": {"x": 1}}, {"chat_template_kwargs": {**NO_THINKING, "x": 1}}),
        ({"chat_template_kwargs": THINKING}, {"chat_template_kwargs": THINKING}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"cache_salt": "s", "ignore_eos": True}, {"cache_salt": "s", "ignore_eos": True}),
        ({"session": "s"}, {"session": "s"}),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, {"response_format": ANSWER_FORMAT}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"response_format": ANSWER_FORMAT},
        ),
    ],
)
def test_fields_of_messages_become_fields_of_a_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    base = {"messages": [USER], "max_tokens": 9, "chat_template_kwargs": NO_THINKING}
    assert chat_of_messages(USER, **fields) == base | expected


def test_blocks_become_texts_calls_and_results() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"city": "Oslo"}}
    chat_call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    failed = {"type": "tool_result", "tool_use_id": "c1", "content": [text("no"), text("way")], "is_error": True}
    result = {"type": "tool_result", "tool_use_id": "c2", "cache_control": {"type": "ephemeral"}}
    chat = chat_of_messages(
        blocks("user", text("a"), text("b")),
        blocks("assistant", thinking, redacted, text("c"), use),
        blocks("user", text("d"), failed, result, text("e")),
        system=[text("s1"), text("s2")],
    )
    assert chat["messages"] == [
        {"role": "system", "content": "s1\ns2"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [chat_call], "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "tool", "tool_call_id": "c1", "content": "Error: no\nway"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "e"},
    ]
    assert "continue_final_message" not in chat


def test_last_text_of_the_assistant_is_continued() -> None:
    chat = chat_of_messages(USER, {"role": "assistant", "content": "The answer is"})
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)


def test_tokens_are_counted_of_the_same_prompt() -> None:
    body = {
        "model": "demo",
        "messages": [USER, {"role": "assistant", "content": "a"}],
        "system": "s",
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low"},
    }
    counted, chat = translated(translate_count, body), translated(translate_messages, {**body, "max_tokens": 1})
    assert counted == {name: value for name, value in chat.items() if name != "max_tokens"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": [], "system": "s"}, "messages", "is empty"),
        ({"messages": [{"role": "user", "content": []}, USER]}, "messages[0].content", "is an empty list"),
        ({"messages": [blocks("user", {"type": "image"})]}, "messages[0].content[0].type", "'image'; a message of"),
        ({"messages": [blocks("user", {"type": "tool_use"})]}, "messages[0].content[0].type", "text, tool_result"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be one of user"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string or a list of blocks"),
        (
            {"messages": [USER, blocks("assistant", text("a"), TOOL_USE, {**TOOL_USE, "name": ""})]},
            "messages[1].content[2].name",
            "between 1 and 256 characters",
        ),
        (
            {"messages": [USER, blocks("assistant", {**TOOL_USE, "id": ""})]},
            "messages[1].content[0].id",
            "between 1 and 256 characters",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "'any', but there are no tools"),
        ({"system": [{"type": "image"}]}, "system[0].type", "must be 'text'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is missing"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "must be 'auto', 'any'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "at least 1"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "the server runs no tools"),
        ({"container": "c"}, "container", "the server runs no tools"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "clients may not set it"),
        ({"stop": ["x"]}, "stop", "send stop_sequences"),
        ({"n": 2}, "n", "send several requests"),
        ({"thread": {"type": "create"}}, "thread", "send all of them"),
        ({"tools": [TOOL] * 10_000}, "tools", "10000 items; at most 128"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id", "must be a string"),
        (
            {"output_format": {"type": "json_schema"}, "output_config": {"format": {"type": "json_schema"}}},
            "output_format",
            "send only output_config.format",
        ),
        ({"stop_sequences": "x"}, "stop_sequences", "must be a list"),
    ],
)
def test_messages_are_refused_by_the_name_of_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidField) as refused:
        translate_messages({"max_tokens": 9, "messages": [USER], **fields}, UnknownFields())
    assert refused.value.param == param
    assert param in str(refused.value)
    assert words in str(refused.value)


def test_unknown_fields_are_ignored_at_every_level() -> None:
    body = {
        "max_tokens": 1,
        "messages": [{**blocks("user", {**text("a"), "u1": 1}), "u2": 1}],
        "tools": [{**TOOL, "u3": 1}],
        "u4": 1,
    }
    names = ["u4", "messages[].u2", "messages[].content[].u1", "tools[].u3"]
    translated(translate_messages, body, *names)
    items = [{**blocks("user", {**text("a", "input_text"), "u1": 1}), "u2": 1}]
    choice = {"type": "function", "name": "f", "u6": 1}
    body = {"input": items, "tools": [{**FLAT_TOOL, "u3": 1}], "tool_choice": choice, "text": {"u5": 1}, "u4": 1}
    names = ["u4", "input[].u2", "input[].content[].u1", "tools[].u3", "tool_choice.u6", "text.u5"]
    translated(translate_responses, body, *names)


@pytest.mark.parametrize(
    ("translate", "param", "expected"),
    [
        (translate_responses, "messages[1].tool_calls[0].id", "input[1].tool_calls[0].id"),
        (translate_responses, "messages", "input"),
        (translate_responses, "max_tokens", "max_output_tokens"),
        (translate_responses, "tools[1].function.parameters.type", "tools[1].parameters.type"),
        (translate_responses, "tool_choice.allowed_tools.tools[1]", "tool_choice.tools[1]"),
        (translate_responses, "tool_choice.allowed_tools.mode", "tool_choice.mode"),
        (translate_responses, "response_format.json_schema.schema", "text.format.schema"),
        (translate_responses, "tool_choice.function.name", "tool_choice.name"),
        (translate_responses, "temperature", "temperature"),
        (translate_messages, "messages[1].content", "messages[0].content[0].content"),
        (translate_messages, "messages[0].content", "system.content"),
        (translate_messages, "tools[0].function.parameters.type", "tools[0].input_schema.type"),
        (translate_messages, "tools[0].function.name", "tools[0].name"),
        (translate_messages, "stop", "stop_sequences"),
        (translate_responses, "messages[2].tool_call_id", "input[2].call_id"),
        (translate_messages, "messages[1].tool_call_id", "messages[0].content[0].tool_use_id"),
    ],
)
def test_errors_about_the_chat_name_the_fields_of_the_client(translate: Translate, param: str, expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    body: dict[str, Any] = (
        {"input": [USER, call, output], "tools": [{**FLAT_TOOL, "name": "g"}, FLAT_TOOL], "tool_choice": allowed}
        if translate is translate_responses
        else {"max_tokens": 1, "system": "s", "messages": [blocks("user", result)], "tools": [TOOL]}
    )
    error = InvalidField(param, f"{param} is wrong, {param} and max_tokens", Reason.CONTEXT_LENGTH_EXCEEDED)
    renamed = translate(body, UnknownFields()).renamed(error)
    limit = "max_output_tokens" if translate is translate_responses else "max_tokens"
    assert (renamed.param, str(renamed)) == (expected, f"{expected} is wrong, {expected} and {limit}")
    assert renamed.failure.reason is Reason.CONTEXT_LENGTH_EXCEEDED


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("stop is 'a stop'; stop has at most 4", "stop_sequences is 'a stop'; stop_sequences has at most 4"),
        (
            "stop is \"don't stop\", 'a \\'stop\\'', 'stop me…; send stop",
            "stop_sequences is \"don't stop\", 'a \\'stop\\'', 'stop me…; send stop_sequences",
        ),
        (
            "stop needs stop_token_ids, not a.stop or nonstop",
            "stop_sequences needs stop_token_ids, not a.stop or nonstop",
        ),
        ("the model's stop is not the client's stop", "the model's stop_sequences is not the client's stop_sequences"),
    ],
)
def test_only_the_name_itself_is_replaced_in_an_error(message: str, expected: str) -> None:
    body = {"max_tokens": 1, "messages": [USER]}
    assert str(translate_messages(body, UnknownFields()).renamed(InvalidField("stop", message))) == expected


EVERYTHING: Mapping[Translate, dict[str, Any]] = {
    translate_responses: {
        "input": [
            blocks("user", text("x", "input_text")),
            {"type": "reasoning", "content": [text("x", "reasoning_text")], "summary": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [text("x", "input_text")]},
        ],
        "tools": [FLAT_TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
    },
    translate_messages: {
        "max_tokens": 1,
        "system": [text("s")],
        "messages": [
            blocks(
                "assistant",
                {"type": "thinking", "thinking": "x"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ),
            blocks("user", {"type": "tool_result", "tool_use_id": "c", "content": [text("x")], "is_error": False}),
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
    },
}
WRONG: tuple[Any, ...] = ([], {}, None, 1, "x", True, "\ud800", [[]], [None], [{}], {"type": "text"}, {"type": {}})


def with_wrong_values(value: Any) -> Iterator[Any]:
    """Yield copies of a value, each with one value in it replaced."""
    yield from WRONG
    for at in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for item in with_wrong_values(value[at]):
            copy = value.copy()
            copy[at] = item
            yield copy


@pytest.mark.parametrize("translate", EVERYTHING, ids=["responses", "messages"])
def test_any_value_at_any_place_is_translated_or_refused_with_a_name(translate: Translate) -> None:
    body = EVERYTHING[translate]
    translate(body, UnknownFields())
    num_refused = 0
    for wrong in with_wrong_values(body):
        if not isinstance(wrong, dict):
            continue
        with suppress(InvalidField):
            num_refused += 1
            encode_echo(translate(wrong, UnknownFields()).echo)
            num_refused -= 1
    assert num_refused > 200
