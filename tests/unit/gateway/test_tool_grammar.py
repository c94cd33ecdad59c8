"""Grammars of tool calls: what llguidance accepts, and that the parser reads it back."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from baton.core.errors import Reason
from baton.gateway.constraints.message_grammar import CallableTool, MessageGrammar
from baton.gateway.input.chat.chat_request import parse_chat
from baton.gateway.input.chat.tool_grammar import tool_grammar
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.output import builtin_formats as formats
from baton.gateway.output.formats import OutputFormat, ParserOptions, ReasoningFormat, ToolFormat
from baton.gateway.output.special_text import split_special
from baton.gateway.text.tokenizer import ByteTokenizer
from tests.unit.gateway.output.output_cases import ParsedMessage, join_parts, parts_of

SPECIAL = (
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|constrain|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
)
IDS = {text: 256 + number for number, text in enumerate(SPECIAL)}
WEATHER = CallableTool(
    name="get_weather",
    parameters={
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
PING = CallableTool(name="ping")
FREE = CallableTool(name="free", parameters={"type": "object"})


class _Vocabulary:
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = tuple(bytes((byte,)) for byte in range(256)) + tuple(text.encode() for text in SPECIAL)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary()), n_vocab=len(_Vocabulary.tokens), slices=[])


def ids_of(text: str) -> list[int]:
    ids: list[int] = []
    for piece in split_special(text, SPECIAL):
        ids += list(piece.encode()) if isinstance(piece, str) else [IDS[piece.text]]
    return ids


def accepts(grammar: str, text: str) -> bool:
    """True if a message may be this text and end there."""
    assert LLMatcher.validate_grammar(grammar, None) == ""
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = ids_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar_of(tools: ToolFormat, reasoning: ReasoningFormat | None = None, prompt: str = "") -> MessageGrammar:
    return MessageGrammar(OutputFormat(tools=tools, reasoning=reasoning), tools, IDS, prompt)


def parsed(tools: ToolFormat, text: str, schemas: Sequence[CallableTool]) -> ParsedMessage:
    options = ParserOptions(
        tools={tool.name: tool.schema for tool in schemas}, special_tokens=frozenset(SPECIAL), call_id_seed="x"
    )
    parts = parts_of(OutputFormat(tools=tools), split_special(text, SPECIAL), options)
    return join_parts(part for some in parts for part in some)


CALLS: Mapping[str, tuple[ToolFormat, str, str]] = {
    "hermes": (
        formats.HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a <b>", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a", "days": 10}}\n</tool_call>',
    ),
    "qwen3_coder": (
        formats.QWEN3_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na <b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": (
        formats.GLM45,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a <b></arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    ),
    "mistral_list": (
        formats.MISTRAL_LIST,
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "a <b>", "days": 3}}]',
        '[TOOL_CALLS][{"name": "other", "arguments": {"city": "a"}}]',
    ),
    "mistral": (
        formats.MISTRAL,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "a <b>", "days": 3}',
        '[TOOL_CALLS]get_weather[ARGS]{"days": 3}',
    ),
    "llama3_json": (
        formats.LLAMA3_JSON,
        '{"name": "get_weather", "parameters": {"city": "a <b>", "days": 3}}',
        '{"name": "get_weather", "parameters": {"city": 1}}',
    ),
    "deepseek_v31": (
        formats.DEEPSEEK_V31,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "a <b>", "days": 3}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    ),
    "gpt_oss": (
        formats.GPT_OSS,
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "a <b>", "days": 3}',
        "<|channel|>final<|message|>x",
    ),
    "gemma4": (
        formats.GEMMA4,
        '<|tool_call>call:get_weather{city:<|"|>a <b><|"|>,days:3}<tool_call|>',
        "<|tool_call>call:get_weather{days:3}<tool_call|>",
    ),
}


@pytest.mark.parametrize("family", CALLS)
def test_required_calls_are_those_that_the_parser_reads(family: str) -> None:
    tools, right, wrong = CALLS[family]
    grammar = grammar_of(tools).required([WEATHER, PING, FREE], parallel=True)
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)
    assert not accepts(grammar, "just text")
    assert not accepts(grammar, "")
    (call,) = parsed(tools, right, [WEATHER]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "a <b>", "days": 3})


@pytest.mark.parametrize("family", CALLS)
def test_required_call_cannot_be_written_with_ordinary_tokens(family: str) -> None:
    tools, right, _ = CALLS[family]
    grammar = grammar_of(tools).required([WEATHER], parallel=True)
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    spelled = list(right.encode())
    can_be_spelled = not any(text in right for text in SPECIAL)
    assert (matcher.try_consume_tokens(spelled) == len(spelled)) is can_be_spelled


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


def test_strict_calls_follow_their_schema_in_free_text() -> None:
    grammar = grammar_of(formats.HERMES).automatic([WEATHER], parallel=True)
    assert grammar is not None
    _, right, wrong = CALLS["hermes"]
    for text, is_accepted in (
        ("only text with < and {", True),
        (f"I look.\n{right}", True),
        (f"{right}\n{right} done", True),
        (wrong, False),
        (f"text {wrong}", False),
    ):
        assert accepts(grammar, text) is is_accepted, text
    assert grammar_of(formats.LLAMA3_JSON).automatic([WEATHER], parallel=True) is None
    once = grammar_of(formats.HERMES).automatic([WEATHER], parallel=False)
    assert once is not None
    assert not accepts(once, f"{right}{right}")


@pytest.mark.parametrize("tools", [formats.HERMES, formats.QWEN3_CODER, formats.GLM45, formats.GEMMA4])
def test_tools_without_a_schema(tools: ToolFormat) -> None:
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


def test_schemas_of_all_kinds_are_written() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "a/b": {"type": "array", "items": {"type": "string"}},
            'q"uote': {"type": "object", "properties": {"x": {"type": "number"}}},
            "any": {},
            "ref": {"$ref": "#/$defs/d"},
            "const": {"const": "x\ny"},
            "bad": True,
        },
        "required": ["any"],
        "$defs": {"d": {"type": "object"}},
    }
    schema["properties"] |= {f"optional{number}": {"type": "string"} for number in range(40)}
    for tools in (formats.HERMES, formats.QWEN3_CODER, formats.GEMMA4):
        grammar = grammar_of(tools).required([CallableTool(name="f", parameters=schema)], parallel=True)
        assert LLMatcher.validate_grammar(grammar, None) == ""


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


# Random messages that the grammar allows.

WALK_TOOLS = [
    WEATHER,
    PING,
    CallableTool(
        name="nested",
        parameters={
            "type": "object",
            "properties": {
                "items": {"type": "array", "items": {"type": "integer"}},
                "flag": {"type": "boolean"},
                "note": {"type": "string", "maxLength": 20},
                "kind": {"enum": ["a", "b"]},
                "level": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "title": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
                "many": {"type": ["integer", "string"]},
            },
            "required": ["flag", "kind"],
            "additionalProperties": False,
        },
    ),
]
ENDINGS = frozenset(b'"{}[]<>/\n,:0123456789') | set(IDS.values())
"""Tokens that bring a message to its end."""


def random_message(grammar: str, rng: Random, closing: str, max_tokens: int = 2000) -> str:
    """Return a message of random tokens that the grammar allows, mostly of those that end it.

    closing: text that ends a long value, which random tokens would hardly hit.
    """
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    text = bytearray()
    for _ in range(max_tokens):
        if matcher.is_accepting() and rng.random() < 0.5:
            return text.decode()
        if (
            closing
            and rng.random() < 0.1
            and matcher.deep_copy().try_consume_tokens(ids_of(closing)) == len(ids_of(closing))
        ):
            assert matcher.consume_tokens(ids_of(closing))
            text += closing.encode()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [id_ for id_ in range(257, len(_Vocabulary.tokens)) if mask >> id_ & 1]
        allowed += [byte for byte in range(9, 127) if mask >> byte & 1]
        if not allowed and matcher.is_accepting():
            return text.decode()
        endings = [id_ for id_ in allowed if id_ in ENDINGS]
        id_ = rng.choice(endings if endings and rng.random() < 0.7 else allowed)
        assert matcher.consume_token(id_)
        text += _Vocabulary.tokens[id_]
    raise AssertionError(f"the message does not end: {bytes(text[:200])!r}")


@pytest.mark.parametrize("family", CALLS)
def test_random_messages_of_the_grammar_are_valid_calls(family: str) -> None:
    tools, _, _ = CALLS[family]
    grammar = grammar_of(tools).required(WALK_TOOLS, parallel=True)
    schemas = {tool.name: tool.schema for tool in WALK_TOOLS}
    for seed in range(8):
        closing = tools.syntax.parameters.after_value if tools.syntax.parameters else ""
        text = random_message(grammar, Random(seed), closing)
        message = parsed(tools, text, WALK_TOOLS)
        assert message.tool_calls, text
        assert message.content == "", text
        for call in message.tool_calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
