"""Validation of tools, of messages with tool calls, and of the fields for the chat template."""

import json
from typing import Any

import pytest

from baton.core.errors import Reason, Refused
from baton.gateway.input.chat.chat_request import ChatRequest, parse_chat
from baton.gateway.input.chat.tool_fields import Tool, ToolMode, ToolUse
from baton.gateway.input.client_call import Endpoint, InvalidField
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.strict_json import parse_object
from tests.cpu_time import CpuTime
from tests.unit.gateway.validator_calls import call, refusal

USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": list(range(2000))}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"name": name, "parameters": SCHEMA} | fields


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": function(name, **fields)}


def chat(**body: Any) -> ChatRequest:
    return parse_chat({"messages": [USER]} | body, UnknownFields(is_strict=True))


NAMED = {"type": "function", "function": {"name": "f"}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    """Return a body with two tools, `g` and `f`, of which some are allowed."""
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}
    return {"tools": [tool("g"), tool()], "tool_choice": choice}


def messages_of(*messages: Any) -> list[dict[str, Any]]:
    return list(parse_chat({"messages": [*messages]}, UnknownFields(is_strict=True)).prompt.messages)


def test_tools_are_kept_for_the_template_and_for_the_output() -> None:
    body = {"messages": [USER], "tools": [tool(description="d", strict=True), tool("g.h-1_", parameters=None)]}
    parsed = parse_chat(
        parse_object(json.dumps(body).encode()), UnknownFields()
    )  # a long list of ids is an array there
    assert parsed.prompt.tools == (
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "description": "d"}},
        {"type": "function", "function": {"name": "g.h-1_"}},
    )
    assert parsed.tools.tools == (Tool(name="f", parameters=SCHEMA, strict=True), Tool(name="g.h-1_"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (ToolMode.AUTO, None, True, False)),
        ({"tool_choice": "none"}, (ToolMode.NONE, None, True, False)),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, (ToolMode.AUTO, None, False, False)),
        ({"tool_choice": "required"}, (ToolMode.REQUIRED, None, True, False)),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            (ToolMode.REQUIRED, "f", True, False),
        ),
    ],
)
def test_tool_choice_says_how_tools_are_used(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    use = chat(tools=[tool()], **fields).tools
    assert (use.mode, use.only, use.parallel, use.is_legacy) == expected


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_seen_and_called(mode: str) -> None:
    parsed = chat(**allowed(mode, NAMED))
    assert parsed.tools == ToolUse(tools=(Tool(name="f", parameters=SCHEMA),), mode=ToolMode(mode))
    assert parsed.tools.tools[0].place == "tools[1].function"
    assert parsed.prompt.tools == (tool(),)
    both = allowed(mode, {"type": "function", "function": {"name": "g"}}, NAMED)
    assert [each.name for each in chat(**both).tools.tools] == ["g", "f"]


def test_legacy_functions_are_tools_with_one_call() -> None:
    use = chat(functions=[function()], function_call={"name": "f"}).tools
    assert use == ToolUse(
        tools=(Tool(name="f", parameters=SCHEMA),), mode=ToolMode.REQUIRED, only="f", parallel=False, is_legacy=True
    )
    assert chat(functions=[function()], function_call="auto").tools.mode is ToolMode.AUTO


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}, {"functions": [], "function_call": "auto"}])
def test_empty_tools_are_no_tools(fields: dict[str, Any]) -> None:
    parsed = chat(**fields)
    assert (parsed.prompt.tools, parsed.tools.mode) == (None, ToolMode.NONE)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool()] * 129}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"function": function()}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool() | {"x": 1}]}, "tools[0].x"),
        ({"tools": [tool(x=1)]}, "tools[0].function.x"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("f\n")]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1]"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(parameters={"type": ["string", "null"]})]}, "tools[0].function.parameters.type"),
        ({"functions": [function(parameters={"type": 1})]}, "functions[0].parameters.type"),
        ({"tools": [tool(strict=1)]}, "tools[0].function.strict"),
        ({"tools": [tool(description="a\0")]}, "tools[0].function.description"),
        ({"tools": [tool(parameters={"\ud800": 1})]}, "tools[0].function.parameters"),
        ({"tools": [tool(description="x" * 300_000)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 1}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (allowed("none", NAMED), "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("auto", NAMED, {"type": "function", "function": {"name": "x"}}), "tool_choice.allowed_tools.tools[1]"),
        (allowed("auto", NAMED, NAMED), "tool_choice.allowed_tools.tools[1]"),
        (allowed("auto", {"type": "mcp"}), "tool_choice.allowed_tools.tools[0].type"),
        (allowed("auto", {"type": "function"}), "tool_choice.allowed_tools.tools[0].function"),
        (allowed("auto", *[NAMED] * 129), "tool_choice.allowed_tools.tools"),
        (allowed("auto", NAMED | {"x": 1}), "tool_choice.allowed_tools.tools[0].x"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [tool()], "functions": [function()]}, "functions"),
        ({"functions": [function()], "function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [function()], "function_call": "required"}, "function_call"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"reasoning_effort": "x" * 33}, "reasoning_effort"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template": ""}, "chat_template"),
        ({"chat_template": "x" * 70_000}, "chat_template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a\n": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 70_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"x{n}": 1 for n in range(65)}}, "chat_template_kwargs"),
        ({"documents": {}}, "documents"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"documents": [{}] * 1025}, "documents"),
    ],
)
def test_error_names_the_invalid_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert len(str(refused.value)) < 300


def test_variables_of_the_template_are_collected() -> None:
    prompt = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": None, "x": [1, {"y": 2}]}).prompt
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert prompt.variables == off | {"enable_thinking": None, "x": [1, {"y": 2}]}
    assert chat(reasoning_effort="none").prompt.variables == off
    assert chat(continue_final_message=True).prompt.add_generation_prompt is False
    assert chat(documents=[]).prompt.documents is None


# Messages.


def test_tool_calls_and_results_are_converted() -> None:
    answer = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL], "refusal": None}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]}
    assert messages_of(USER, answer, result) == [
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": [1]}},
                    "arguments_text": '{"a": [1]}',
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "4"},
    ]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ("{}", {}),
        (" ", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ('{"a": ', '{"a": '),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": ' + "[" * 5000, '{"a": ' + "[" * 5000),
        (json.dumps({"a": list(range(2000))}), {"a": list(range(2000))}),
    ],
)
def test_arguments_are_an_object_if_they_can_be(given: Any, arguments: Any) -> None:
    call_ = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    (message,) = messages_of({"role": "assistant", "tool_calls": [call_]})
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert type(message["tool_calls"][0]["function"]["arguments"]) is type(arguments)


def test_error_about_a_function_call_names_only_what_it_may_be() -> None:
    with pytest.raises(InvalidField) as refused:
        chat(functions=[function()], function_call="required")
    assert str(refused.value).endswith("must be 'none', 'auto' or {\"name\": ...}")


def test_error_about_a_tool_choice_holds_for_all_apis() -> None:
    """The objects of the APIs differ, so only their types are named."""
    with pytest.raises(InvalidField) as refused:
        chat(tools=[{"type": "function", "function": function()}], tool_choice="f")
    rule = "must be 'none', 'auto', 'required', or an object whose type is 'function' or 'allowed_tools'"
    assert str(refused.value) == f"tool_choice is 'f'; {rule}"


def test_legacy_function_call_becomes_a_tool_call() -> None:
    answer = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    _, called, result = messages_of(USER, answer, {"role": "function", "name": "f", "content": "4"})
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert result == {
        "role": "tool",
        "name": "f",
        "tool_call_id": called["tool_calls"][0]["id"],
        "content": "4",
    }


def test_refusal_is_the_content_of_an_answer() -> None:
    assert messages_of({"role": "assistant", "content": None, "refusal": "no"})[0]["content"] == "no"
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert messages_of({"role": "assistant", "content": parts})[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant"}, "content"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL] * 129}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [CALL | {"id": None}]}, "tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [CALL | {"id": ""}]}, "tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [CALL | {"function": {}}]}, "tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": 1}}]},
            "tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "f"}}, "function_call"),
        ({"role": "assistant", "content": "x", "reasoning_content": 1}, "reasoning_content"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "audio"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content[0].type"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "content": None, "tool_call_id": "c"}, "content"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "unknown"}, "tool_call_id"),
        ({"role": "function", "content": "x"}, "name"),
        ({"role": "robot", "content": "x"}, "role"),
    ],
)
def test_error_names_the_place_in_the_message(message: dict[str, Any], param: str) -> None:
    error = refusal({"messages": [message]}, Endpoint.CHAT)
    assert error.param == f"messages[0].{param}"


# Templates.


def test_own_template_needs_a_setting() -> None:
    error = refusal({"messages": [USER], "chat_template": "x"}, Endpoint.CHAT)
    assert (error.param, error.failure.reason) == ("chat_template", Reason.UNSUPPORTED_FIELD)
    assert "--allow-request-chat-template" in str(error)


# Cost.

HOSTILE: dict[str, dict[str, Any]] = {
    "10,000 tools": {"messages": [USER], "tools": [tool(parameters={}) for _ in range(10_000)]},
    "a large tool": {"messages": [USER], "tools": [tool(description="x" * 7_000_000)]},
    "a large schema": {"messages": [USER], "tools": [tool(parameters={"enum": ["ab"] * 200_000})]},
    "a result of 8 MiB": {
        "messages": [
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "x" * 8_300_000},
        ]
    },
    "arguments of many values": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    CALL | {"function": {"name": "f", "arguments": "{" + '"a":[[],[]],' * 100_000}} for _ in range(6)
                ],
            }
        ]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_large_request_is_checked_within_a_bounded_time(name: str) -> None:
    body = HOSTILE[name]
    with CpuTime() as cpu:
        try:
            call(body, Endpoint.CHAT)
            refused = ""
        except Refused as error:
            refused = str(error)
    assert cpu.spent_s < 0.3
    assert refused
    assert len(refused) < 300
