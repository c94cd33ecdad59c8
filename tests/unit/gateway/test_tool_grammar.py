"""Grammars of tool calls: what llguidance accepts, and that the parser reads it back."""

import json
from typing import Any

import pytest

from baton.core.errors import Reason
from baton.gateway.constraints.message_grammar import CallableTool
from baton.gateway.input.answers.answer_grammar import answer_grammar
from baton.gateway.input.answers.constraint_fields import parse_constraint
from baton.gateway.input.chat.chat_request import parse_chat
from baton.gateway.input.chat.tool_grammar import tool_grammar
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.output import builtin_formats as formats
from baton.gateway.output.formats import OutputFormat, ToolFormat
from baton.gateway.text.tokenizer import ByteTokenizer
from tests.unit.gateway.grammar_cases import FREE, PING, SPECIAL, WEATHER, accepts, grammar_of, parsed
from tests.unit.gateway.output.output_cases import FORMATS, written, written_call


def call_of(family: str, days: int = 3) -> str:
    tools = tools_of(family)
    return written_call(tools, "get_weather", written(tools, {"city": "a <b>", "days": days}))


def tools_of(family: str) -> ToolFormat:
    tools = FORMATS[family].tools
    assert tools is not None
    return tools


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("family", FORMATS)
def test_required_calls_are_those_that_the_parser_reads(family: str, special: bool) -> None:
    tools = tools_of(family)
    grammar = grammar_of(tools, special=special).required([WEATHER, PING, FREE], parallel=True)
    assert accepts(grammar, call_of(family), special=special)
    for wrong in (call_of(family, days=10), call_of(family).replace("get_weather", "other"), "just text", ""):
        assert not accepts(grammar, wrong, special=special)
    (call,) = parsed(tools, call_of(family), [WEATHER]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "a <b>", "days": 3})


@pytest.mark.parametrize("family", FORMATS)
def test_delimiters_that_are_special_tokens_cannot_be_written_with_ordinary_ones(family: str) -> None:
    grammar = grammar_of(tools_of(family)).required([WEATHER], parallel=True)
    can_be_spelled = not any(text in call_of(family) for text in SPECIAL)
    assert accepts(grammar, call_of(family), special=False) is can_be_spelled


def test_one_call_only_without_parallel_calls() -> None:
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    two = f"{call}\n{call}"
    assert accepts(grammar_of(formats.HERMES).required([PING], parallel=True), two)
    grammar = grammar_of(formats.HERMES).required([PING], parallel=False)
    assert accepts(grammar, call)
    assert not accepts(grammar, two)
    assert len(parsed(formats.HERMES, two, [PING]).tool_calls) == 2


@pytest.mark.parametrize(
    ("prompt", "right", "wrong"),
    [
        ("x<|im_end|>", ["CALL", "<think>so</think>\n\nCALL"], ["so</think>CALL", "<think>CALL"]),
        ("<think>\n", ["so</think>\nCALL"], ["CALL", "so CALL"]),
        ("<think>\n\n</think>\n\n", ["CALL"], ["<think>so</think>CALL", "so</think>CALL"]),
    ],
)
def test_reasoning_stands_before_the_calls(prompt: str, right: list[str], wrong: list[str]) -> None:
    grammar = grammar_of(formats.HERMES, formats.THINK, prompt).required([PING], parallel=True)
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    assert [accepts(grammar, text.replace("CALL", call)) for text in right] == [True] * len(right)
    assert [accepts(grammar, text.replace("CALL", call)) for text in wrong] == [False] * len(wrong)


def test_analysis_of_harmony_stands_before_the_call() -> None:
    grammar = grammar_of(formats.GPT_OSS, formats.HARMONY_ANALYSIS).required([PING], parallel=True)
    call = "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}"
    assert accepts(grammar, call)
    assert accepts(grammar, f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{call}")


WITH_TRIGGER = [family for family in FORMATS if family not in ("llama3_json", "gpt_oss")]


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("family", WITH_TRIGGER)
def test_strict_calls_follow_their_schema_in_free_text(family: str, special: bool) -> None:
    tools = tools_of(family)
    grammar = grammar_of(tools, special=special).automatic([WEATHER, PING], parallel=True)
    once = grammar_of(tools, special=special).automatic([WEATHER, PING], parallel=False)
    right, wrong = call_of(family), call_of(family, days=10)
    ping = written_call(tools, "ping", written(tools, {}))
    for text, is_accepted, is_accepted_once in (
        ("", True, True),
        ("only text with < and { and [", True, True),
        (f"I look.\n{right}", True, True),
        (f"{ping}\n{right} done", True, False),
        (wrong, False, False),
        (f"text {wrong}", False, False),
        (f"{right}{wrong}", False, False),
        (tools.triggers[0], False, False),
        (f"a {tools.triggers[-1]} b", False, False),
    ):
        assert accepts(grammar, text, special=special) is is_accepted, text
        assert accepts(once, text, special=special) is is_accepted_once, text
    calls = parsed(tools, f"{ping}\n{right}", [WEATHER, PING]).tool_calls
    assert [call.name for call in calls] == ["ping", "get_weather"]


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_message_that_begins_with_a_brace_is_a_strict_call(special: bool) -> None:
    grammar = grammar_of(formats.LLAMA3_JSON, special=special).automatic([WEATHER], parallel=True)
    once = grammar_of(formats.LLAMA3_JSON, special=special).automatic([WEATHER], parallel=False)
    right, wrong = call_of("llama3_json"), call_of("llama3_json", days=10)
    for text, is_accepted in (
        ("", True),
        (f"an object: {right}", True),
        (right, True),
        (f"{right}; {right}", True),
        (f"I look. <|python_tag|>{right}", True),
        (f"<|python_tag|>{right}", True),
        (wrong, False),
        (f" {wrong}", False),
        (f"I look. <|python_tag|>{wrong}", False),
        ('{"city": "a"}', False),
        ("<|python_tag|>print(1)", False),
    ):
        assert accepts(grammar, text, special=special) is is_accepted, text
    assert not accepts(once, f"{right}; {right}", special=special)


def test_last_message_of_harmony_is_an_answer_or_a_strict_call() -> None:
    grammar = grammar_of(formats.GPT_OSS, formats.HARMONY_ANALYSIS).automatic([WEATHER], parallel=True)
    thought = "<|channel|>analysis<|message|>so {<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>It is 3."
    for text, is_accepted in (
        (final, True),
        (f"{thought}{final}", True),
        (call_of("gpt_oss"), True),
        (f"{thought}{preamble}{thought}{call_of('gpt_oss')}", True),
        (call_of("gpt_oss", days=10), False),
        (f"{thought}{call_of('gpt_oss', days=10)}", False),
        (f"{final}<|end|>", False),
        (thought, False),
        ("text", False),
    ):
        assert accepts(grammar, text) is is_accepted, text


@pytest.mark.parametrize("tools", [formats.HERMES, formats.QWEN3_CODER, formats.GLM45, formats.GEMMA4])
def test_tool_without_a_schema_takes_any_arguments(tools: ToolFormat) -> None:
    grammar = grammar_of(tools).required([PING, FREE], parallel=True)
    text = {
        "hermes": '<tool_call>\n{"name": "free", "arguments": {"a": [1, {"b": null}]}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=free>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>free\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "gemma4": '<|tool_call>call:free{a:<|"|>x<|"|>,b:[1,{c:true}]}<tool_call|>',
    }[tools.name]
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace("free", "ping"))


def test_white_space_in_json_is_bounded() -> None:
    grammar = grammar_of(formats.LLAMA3_JSON).required([PING], parallel=True)
    assert accepts(grammar, '{"name": "ping", "parameters": {  }}')
    assert not accepts(grammar, f'{{"name": "ping", "parameters": {{{" " * 40}}}}}')


def test_arguments_are_an_object_even_if_the_schema_allows_others() -> None:
    tool = CallableTool(name="f", parameters={"type": ["null", "object"]})
    grammar = grammar_of(formats.LLAMA3_JSON).required([tool], parallel=True)
    assert accepts(grammar, '{"name": "f", "parameters": {"a": 1}}')
    assert not accepts(grammar, '{"name": "f", "parameters": null}')


async def test_strict_schema_that_the_format_cannot_enforce_names_the_tool() -> None:
    kinds = [{"properties": {"k": {"const": number}}, "required": ["k"]} for number in range(100)]
    function = {"name": "f", "parameters": {"type": "object", "anyOf": kinds}, "strict": True}
    tools = [{"type": "function", "function": function}]
    chat = parse_chat({"messages": [{"role": "user", "content": "x"}], "tools": tools}, UnknownFields())
    with pytest.raises(InvalidField, match=r"tools: the parameters of the tool 'f': .* too many") as refused:
        await tool_grammar(chat, "", OutputFormat(tools=formats.GEMMA4), ByteTokenizer())
    assert (refused.value.param, refused.value.failure.reason) == ("tools", Reason.INVALID_GRAMMAR)


@pytest.mark.parametrize(
    ("constraint", "remedy"),
    [
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["<f"],
                    "structures": [{"begin": "<f>", "schema": {}, "end": ""}],
                }
            },
            "none or required",
        ),
        ({"structured_outputs": {"regex": "a"}}, "set tool_choice to none$"),
    ],
)
async def test_constraint_that_excludes_calls_names_only_remedies_that_work(
    constraint: dict[str, Any], remedy: str
) -> None:
    """A required call and `structured_outputs` are refused together."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = parse_chat({"messages": [{"role": "user", "content": "x"}], "tools": tools}, UnknownFields())
    found = parse_constraint(constraint, UnknownFields())
    with pytest.raises(InvalidField, match=remedy):
        await answer_grammar(found, chat, "", OutputFormat(tools=formats.HERMES), ByteTokenizer())


async def test_grammar_above_its_size_is_refused() -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(3000)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    chat = parse_chat(body, UnknownFields())
    with pytest.raises(InvalidField, match="65,536 bytes") as refused:
        await tool_grammar(chat, "", OutputFormat(tools=formats.HERMES), ByteTokenizer())
    assert (refused.value.param, refused.value.failure.reason) == ("tools", Reason.INVALID_GRAMMAR)
