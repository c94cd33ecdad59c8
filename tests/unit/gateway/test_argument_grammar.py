"""Grammars of arguments: every message that they allow has valid arguments, for schemas of all kinds."""

import json
import re._parser as re_parser  # type: ignore[import-not-found]
from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from baton.gateway.constraints.gbnf import GrammarTextError
from baton.gateway.constraints.message_grammar import CallableTool
from baton.gateway.constraints.string_formats import FORMAT_LENGTHS, FORMAT_PATTERNS
from baton.gateway.constraints.text_pattern import whole_text_pattern
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.schemas.schema_reader import read_schema
from baton.gateway.output import builtin_formats as formats
from baton.gateway.output.formats import OutputFormat, ParserOptions, ToolFormat
from tests.cpu_time import CpuTime
from tests.unit.gateway.grammar_cases import (
    IDS,
    PING,
    WEATHER,
    accepts,
    grammar_of,
    ids_of,
    parsed,
    random_message,
    vocabulary,
)
from tests.unit.gateway.output.output_cases import FORMATS, join_parts, parts_of, written, written_call

TYPED = ("qwen3_coder", "glm45", "minimax_m2", "seed_oss", "deepseek_v32", "gemma4", "functiongemma")
"""Families whose arguments are no JSON."""
COLOR = {"enum": ["red", "blue"], "type": "string"}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def tool_with(schema: Any, **more: Any) -> CallableTool:
    """Return a tool with the one parameter `a`."""
    root = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return CallableTool(name="f", parameters=root | {"$defs": {"Color": COLOR, "Point": POINT}} | more)


def verdict(tools: ToolFormat, tool: CallableTool, value: Any, *, special: bool) -> tuple[bool, bool]:
    """Return whether the grammar allows the value, and whether what the parser reads is valid."""
    text = written_call(tools, "f", written(tools, {"a": value}))
    is_allowed = accepts(grammar_of(tools, special=special).required([tool], parallel=True), text, special=special)
    (call,) = parsed(tools, text, [tool]).tool_calls
    return is_allowed, jsonschema.Draft202012Validator(tool.schema).is_valid(json.loads(call.arguments))


@pytest.mark.parametrize(
    ("family", "special"),
    [
        ("qwen3_coder", True),
        ("glm45", False),
        ("minimax_m2", False),
        ("deepseek_v32", True),
        ("deepseek_v32", False),
        ("gemma4", True),
    ],
)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (COLOR, ["red"], ["green", '"red"', 3]),
        ({"$ref": "#/$defs/Color"}, ["red"], ["green", '"red"', 3]),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "description": "d"}, ["blue"], ["green", '"blue"']),
        ({"anyOf": [COLOR, {"type": "null"}]}, ["red", None], ["green", 3]),
        ({"type": ["string", "null"], "enum": ["red", None]}, ["red", None], ["green", 3]),
        ({"enum": ["red", 1, True, 2.5]}, ["red", 1, True, 2.5], ["green", 2, False]),
        ({"const": 3}, [3], [4, "x"]),
        ({"type": "integer", "minimum": 2, "maximum": 5}, [3], [1, 6, "x", 2.5]),
        ({"type": "boolean"}, [True, False], ["maybe", 2]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["abc"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^[a-z]+/[0-9]$|^x"}, ["ab/3", "xyz"], ["ab/", "3", "ax"]),
        ({"anyOf": [{"type": "integer", "maximum": 5}, {"type": "null"}]}, [3, None], [6, "x"]),
        ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], ["x", 3]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ["a b", ["a"]], []),
        ({"$ref": "#/$defs/Point"}, [{"x": 1}], ["x", {}, {"x": "y"}]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"k": 1}, {}], [{"k": "v"}, 3]),
        (True, ["text", "a </b"], []),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    ],
    ids=str,
)
def test_values_follow_their_schema(
    family: str, special: bool, schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    tools = FORMATS[family].tools
    assert tools is not None
    for value in right:
        assert verdict(tools, tool_with(schema), value, special=special) == (True, True), value
    for value in wrong:
        assert not verdict(tools, tool_with(schema), value, special=special)[0], value


@pytest.mark.parametrize("family", ["qwen3_coder", "deepseek_v32", "gemma4"])
def test_members_of_the_whole_schema(family: str) -> None:
    tools = FORMATS[family].tools
    assert tools is not None
    root = {"$defs": {"Point": POINT}}
    cases: list[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = [
        ({"$ref": "#/$defs/Point", **root}, {"x": 1}, [{"x": "y"}, {}, {"y": 1}]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"k": 1}, [{"k": "v"}]),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
            {"a": 1, "b": "x"},
            [{"a": 1}],
        ),
    ]
    for schema, right, wrong in cases:
        tool = CallableTool(name="f", parameters=schema)
        grammar = grammar_of(tools).required([tool], parallel=True)
        text = written_call(tools, "f", written(tools, right))
        assert accepts(grammar, text)
        assert json.loads(parsed(tools, text, [tool]).tool_calls[0].arguments) == right
        for arguments in wrong:
            assert not accepts(grammar, written_call(tools, "f", written(tools, arguments)))


def test_list_of_gemma_has_its_length_and_recursive_schemas_end() -> None:
    tools = formats.GEMMA4
    many = tool_with({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3})
    for value, is_allowed in (([1], False), ([1, 2], True), ([1, 2, 3], True), ([1, 2, 3, 4], False)):
        assert verdict(tools, many, value, special=True) == (is_allowed, is_allowed)
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}, "v": {"type": "integer"}},
        "required": ["next", "v"],
    }
    tree = tool_with({"$ref": "#/$defs/Node"}, **{"$defs": {"Node": node}})
    for family in TYPED:
        tools_of = FORMATS[family].tools
        assert tools_of is not None
        for value, is_allowed in (
            ({"next": {"next": None, "v": 1}, "v": 2}, True),
            ({"next": {"next": None}, "v": 2}, False),
        ):
            assert verdict(tools_of, tree, value, special=True) == (is_allowed, is_allowed), family


def test_special_token_may_follow_a_zero_that_is_a_multiple() -> None:
    """Computing the mask after such a 0 failed in llguidance."""
    tool = tool_with({"type": "number", "multipleOf": 60, "minimum": 0, "maximum": 10_000})
    grammar = grammar_of(formats.GLM45).required([tool], parallel=True)
    matcher = LLMatcher(vocabulary(), grammar.text, log_level=0)
    assert matcher.consume_tokens(
        ids_of(written_call(formats.GLM45, "f", written(formats.GLM45, {"a": 0})).split("</arg_value>")[0])
    )
    assert int.from_bytes(matcher.compute_bitmask(), "little") >> IDS["</arg_value>"] & 1
    assert not matcher.is_error()


def test_lengths_of_formats_are_those_of_their_patterns() -> None:
    for name, pattern in FORMAT_PATTERNS.items():
        least, most = re_parser.parse(pattern).getwidth()
        assert FORMAT_LENGTHS[name] == (least, most if most < 1000 else None), name


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a$", "(?:(?:a))"),
        ("a|^b", "(?:(?s:.*)(?:a)(?s:.*))|(?:(?:b)(?s:.*))"),
        ("^(a|[$^|])\\$", "(?:(?:(a|[$^|])\\$)(?s:.*))"),
        ("", "(?:(?s:.*)(?:)(?s:.*))"),
        ("(?=a)b", None),
        ("(a)\\1", None),
        ("(^a)", None),
        ("a$b", None),
        ("(a", None),
        ("\\bword", None),
    ],
)
def test_pattern_becomes_one_for_a_whole_text(pattern: str, expected: str | None) -> None:
    assert whole_text_pattern(pattern) == expected


def test_pattern_that_cannot_be_converted_is_ignored_unless_the_tool_is_strict() -> None:
    tool = tool_with({"type": "string", "pattern": "(?=a)b"})
    lenient = grammar_of(formats.QWEN3_CODER).required([tool], parallel=True)
    assert LLMatcher.validate_grammar(lenient.text, None) == ""
    strict = CallableTool(name="f", parameters=tool.parameters, strict=True)
    with pytest.raises(GrammarTextError, match=r"the tool 'f' at /properties/a/pattern: .*look-around"):
        grammar_of(formats.QWEN3_CODER).required([strict], parallel=True)


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
    for tools in (formats.HERMES, formats.QWEN3_CODER, formats.DEEPSEEK_V32, formats.GEMMA4):
        grammar = grammar_of(tools).required([CallableTool(name="f", parameters=schema)], parallel=True)
        assert LLMatcher.validate_grammar(grammar.text, None) == ""


@pytest.mark.parametrize("leaf", [{"type": "object"}, {"type": "string"}])
@pytest.mark.parametrize("family", ["qwen3_coder", "gemma4"])
def test_cost_of_unions_that_multiply_is_bounded(family: str, leaf: dict[str, Any]) -> None:
    """It takes up to 0.2 s of CPU, or twice that on a shared machine; without bounds it is minutes."""
    tools = FORMATS[family].tools
    assert tools is not None
    fans = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 8} for n in range(20)}
    schemas: list[dict[str, Any]] = [
        {"$ref": "#/$defs/0", "$defs": {**fans, "20": leaf}},
        {"$ref": "#/$defs/14", "$defs": {**fans, "20": leaf}},
        {"allOf": [{"anyOf": [leaf, {"required": ["a"]}]}] * 500},
        {"properties": {"a": {"$ref": "#", "minProperties": 1}, "b": {"$ref": "#", "maxProperties": 9}}},
    ]
    with CpuTime() as cpu:
        for schema in schemas:
            tool = CallableTool(name="f", parameters={"type": "object", **schema}, strict=True)
            with suppress(GrammarTextError):
                grammar_of(tools).required([tool], parallel=True)
        many = [CallableTool(name=f"f{n}", parameters={"type": "object", **schemas[0]}) for n in range(128)]
        grammar_of(tools).required(many, parallel=True)
    assert cpu.spent_s < 1.0


@pytest.mark.parametrize("family", ["qwen3_coder", "deepseek_v32", "gemma4"])
def test_cost_of_hostile_schemas_is_bounded(family: str) -> None:
    tools = FORMATS[family].tools
    assert tools is not None
    big = {f"k{number}": number for number in range(2500)}
    many = {f"p{number}": {"$ref": "#/$defs/A", "description": "d"} for number in range(500)}
    definitions: list[dict[str, Any]] = [
        {"A": {"type": "object", **big}},
        {"A": {"anyOf": [{"type": "integer"}] * 64, **big}},
        {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 64}},
        {"A": {"type": "object", "properties": {"x": {"enum": list(range(8000))}}}},
    ]
    with CpuTime() as cpu:
        for each in definitions:
            tool = CallableTool(name="f", parameters={"type": "object", "properties": many, "$defs": each})
            with suppress(GrammarTextError):
                grammar_of(tools).required([tool], parallel=True)
    assert cpu.spent_s < 1.0  # without bounds it is minutes


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("family", ["glm45", "deepseek_v32", "gemma4"])
def test_cost_of_long_lists_of_values_is_bounded(family: str, strict: bool) -> None:
    """It takes less than 0.1 s of CPU; without bounds it is minutes."""
    tools = FORMATS[family].tools
    assert tools is not None
    many = {f"p{number}": {"$ref": "#/$defs/A", "minimum": number} for number in range(500)}
    numbers = {"anyOf": [{"enum": list(range(5000)), "const": 3}] * 64}
    anchors = {"properties": {f"p{number}": {"$ref": f"#unknown{number}"} for number in range(500)}}
    with CpuTime() as cpu:
        for sent in ({"properties": many, "$defs": {"A": numbers}}, {"properties": many, "then": anchors, "if": {}}):
            with suppress(GrammarTextError, InvalidField):
                parameters = read_schema("p", {"type": "object", "$defs": {"A": {}}, **sent}, lenient=not strict)
                tool = CallableTool(name="f", parameters=parameters, strict=strict, sent=sent)
                grammar_of(tools).required([tool], parallel=True)
    assert cpu.spent_s < 2.0


def test_one_of_with_other_rules_is_refused_if_a_value_may_match_several_schemas() -> None:
    for family in TYPED:
        tools = FORMATS[family].tools
        assert tools is not None
        one_of = {"type": "number", "minimum": 1, "oneOf": [{"maximum": 5}, {"maximum": 9}]}
        parameters = read_schema("p", {"type": "object", "properties": {"a": one_of}, "required": ["a"]})
        with pytest.raises(GrammarTextError, match=r"at /properties/a/oneOf: .*cannot enforce oneOf"):
            grammar_of(tools).required([CallableTool(name="f", parameters=parameters, strict=True)], parallel=True)


UNQUOTED = ("qwen3_coder", "seed_oss", "glm47", "minimax_m2")


@pytest.mark.parametrize("kinds", [["object"], ["string", "object"]])
@pytest.mark.parametrize("family", [*UNQUOTED, "deepseek_v32"])
def test_json_string_may_contain_the_delimiters_after_a_value(family: str, kinds: list[str]) -> None:
    """Delimiters are no special tokens here."""
    tools = FORMATS[family].tools
    assert tools is not None
    syntax = tools.syntax.parameters
    assert syntax is not None
    tool = tool_with({"type": kinds})
    text = f"x{syntax.after_value.strip()}{syntax.before_key}b{syntax.after_key.splitlines()[0]}"
    for value in ({"k": text}, {"k": [f'\\"{text}', 1]}):
        call = written_call(tools, "f", written(tools, {"a": value})).replace("\\uff5c", "｜")
        assert accepts(grammar_of(tools, special=False).required([tool], parallel=True), call, special=False)
        options = ParserOptions(tools={"f": tool.schema})
        for pieces in ([call], list(call)):
            message = join_parts(part for some in parts_of(OutputFormat(tools=tools), pieces, options) for part in some)
            assert [json.loads(each.arguments) for each in message.tool_calls] == [{"a": value}]


@pytest.mark.parametrize("family", UNQUOTED)
def test_string_does_not_begin_like_an_object_where_one_is_allowed(family: str) -> None:
    """The parser would look for the end of the JSON string in the parameters that follow."""
    tools = FORMATS[family].tools
    assert tools is not None
    for schema in ({"type": ["string", "object"]}, {"anyOf": [{"type": "array"}, {"enum": ["x", '{"k": "']}]}):
        for value, is_allowed in (("x", True), ('{"k": "', False)):
            assert verdict(tools, tool_with(schema), value, special=False) == (is_allowed, True)
    open_string = '{"k": "\n'  # a line end is in no JSON string, so the value ends where its delimiter is
    root = {"properties": {"a": {"type": ["string", "object"]}, "b": {"type": "string"}}}
    text = written_call(tools, "f", written(tools, {"a": open_string, "b": '"}'}))
    (call,) = parsed(tools, text, [CallableTool(name="f", parameters=root)], special=False).tool_calls
    assert json.loads(call.arguments) == {"a": open_string, "b": '"}'}


def test_only_definitions_that_are_used_are_written() -> None:
    more = {f"Other{number}": {"type": "object", "properties": {"x": COLOR}} for number in range(500)}
    tool = tool_with({"type": "array", "items": {"$ref": "#/$defs/Line"}})
    assert tool.parameters is not None
    line = {"type": "object", "properties": {"begin": {"$ref": "#/$defs/Point"}}, "required": ["begin"]}
    tool = CallableTool(name="f", parameters={**tool.parameters, "$defs": {"Line": line, "Point": POINT, **more}})
    assert len(grammar_of(formats.QWEN3_CODER).required([tool], parallel=True).text) < 1500
    for value, is_allowed in (([{"begin": {"x": 1}}], True), ([{"begin": {"x": "y"}}], False)):
        assert verdict(formats.QWEN3_CODER, tool, value, special=True)[0] is is_allowed


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
LETTER = {"enum": ["x", "y"]}
CAT = {"properties": {"kind": {"const": "cat"}, "lives": DIGIT}, "required": ["kind", "lives"]}
DOG = {"properties": {"kind": {"const": "dog"}, "tricks": LETTER}, "required": ["kind", "tricks"]}
CLOSED = {"additionalProperties": False}
WHOLE_SCHEMAS: dict[str, dict[str, Any]] = {
    "union": {"anyOf": [CAT | CLOSED, DOG | CLOSED]},
    "exclusive union": {"oneOf": [CAT | CLOSED, DOG | CLOSED]},
    "union of required members": {
        "properties": {"a": DIGIT, "b": LETTER},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "several schemas": {"allOf": [{"properties": {"a": DIGIT}, "required": ["a"]}, DOG]},
    "two rules for a member": {"allOf": [{"properties": {"a": {"minimum": 7}}}], "properties": {"a": DIGIT}},
    "closed by one of several": {"allOf": [CAT | CLOSED, {"properties": {"other": DIGIT}}]},
    "dependent members": {"properties": {"a": DIGIT, "b": LETTER}, "dependentRequired": {"a": ["b"]}},
    "forbidden member": {"properties": {"a": False, "b": DIGIT}, "required": ["b"]},
    "member that nothing matches": {"properties": {"a": {"not": {}}, "b": DIGIT}, "required": ["b"]},
    "tuple": {"properties": {"a": {"prefixItems": [DIGIT, LETTER], "items": False, "minItems": 1, "type": "array"}}},
    "number with two rules": {"properties": {"a": {"allOf": [DIGIT, {"minimum": 7}]}}, "required": ["a"]},
    "string with two rules": {
        "properties": {"a": {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]}},
        "required": ["a"],
    },
    "reference to all of it": {"$ref": "#/$defs/D", "$defs": {"D": DOG}},
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", WHOLE_SCHEMAS)
def test_calls_match_the_whole_schema_that_a_client_sent(name: str, strict: bool) -> None:
    """Schemas are read as those of requests, which writes some of their keywords with others."""
    sent = {"type": "object", **WHOLE_SCHEMAS[name]}
    validator = jsonschema.Draft202012Validator(sent)
    tool = CallableTool(name="f", parameters=read_schema("p", sent, lenient=not strict), strict=strict)
    for family in ("qwen3_coder", "glm45", "deepseek_v32", "gemma4"):
        tools = FORMATS[family].tools
        assert tools is not None
        grammar = grammar_of(tools).required([tool], parallel=False)
        closing = tools.syntax.parameters.after_value if tools.syntax.parameters else ""
        for seed in range(4):
            text = random_message(grammar, Random(seed), closing)
            (call,) = parsed(tools, text, [CallableTool(name="f", parameters=sent)]).tool_calls
            validator.validate(json.loads(call.arguments))


@pytest.mark.parametrize("family", ["qwen3_coder", "deepseek_v32", "gemma4"])
def test_each_object_of_a_union_may_be_called(family: str) -> None:
    tools = FORMATS[family].tools
    assert tools is not None
    sent = {"type": "object", "anyOf": [CAT | CLOSED, DOG | CLOSED]}
    tool = CallableTool(name="f", parameters=read_schema("p", sent), strict=True)
    grammar = grammar_of(tools).required([tool], parallel=False)
    for value in ({"kind": "cat", "lives": 9}, {"kind": "dog", "tricks": "x"}):
        assert accepts(grammar, written_call(tools, "f", written(tools, value)))
    for value in ({"kind": "cat", "tricks": "x"}, {"kind": "dog"}, {}):
        assert not accepts(grammar, written_call(tools, "f", written(tools, value)))


def test_text_that_the_parser_would_strip_to_a_number_is_no_string() -> None:
    tool = tool_with({"anyOf": [{"type": "integer", "maximum": 3}, {"type": "string", "maxLength": 3}]})
    for space in " \n\x1c\x1f\x85\xa0":
        assert not verdict(formats.GLM45, tool, f"7{space}", special=True)[0], repr(space)


@pytest.mark.parametrize(("family", "is_marked"), [("qwen3_coder", False), ("glm45", False), ("deepseek_v32", True)])
def test_string_that_is_a_number_in_another_object_of_a_union(family: str, is_marked: bool) -> None:
    """Formats that do not mark strings have only strings that the parser does not take for the number."""
    tools = FORMATS[family].tools
    assert tools is not None
    small, text = {"type": "integer", "maximum": 0}, {"type": "string"}
    objects = [{"properties": {"a": schema}, "required": ["a"], **CLOSED} for schema in (small, text)]
    sent = {"type": "object", "anyOf": objects}
    tool = CallableTool(name="f", parameters=read_schema("p", sent), strict=True)
    grammar = grammar_of(tools).required([tool], parallel=False)
    for value, is_allowed in (("x", True), ("7", is_marked), (7, False)):
        call = written_call(tools, "f", written(tools, {"a": value}))
        assert accepts(grammar, call) is is_allowed, value
        if is_allowed:
            (found,) = parsed(tools, call, [CallableTool(name="f", parameters=sent)]).tool_calls
            assert json.loads(found.arguments) == {"a": value}


@pytest.mark.parametrize("family", ["qwen3_coder", "gemma4"])
def test_schema_that_the_format_cannot_enforce_is_refused_for_strict_tools(family: str) -> None:
    tools = FORMATS[family].tools
    assert tools is not None
    many = {"anyOf": [{"properties": {"k": {"const": number}}, "required": ["k"]} for number in range(100)]}
    nothing = {"properties": {"a": DIGIT}, "required": ["a", "b"], "additionalProperties": False}
    for schema, words in ((many, "alternatives"), (nothing, "no object")):
        strict = CallableTool(name="f", parameters={"type": "object", **schema}, strict=True)
        with pytest.raises(GrammarTextError, match=f"the parameters of the tool 'f'.*{words}"):
            grammar_of(tools).required([strict], parallel=True)
    lenient = CallableTool(name="f", parameters={"type": "object", **many})
    grammar = grammar_of(tools).required([lenient], parallel=True)
    assert accepts(grammar, written_call(tools, "f", written(tools, {"k": 99})))


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
                "color": {"$ref": "#/$defs/Color"},
                "shade": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "integer", "maximum": 3}]},
                "code": {"type": "string", "pattern": "^[0-9]{2}$"},
                "some": {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]},
                "list": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "boolean"}}]},
            },
            "required": ["flag", "kind", "shade", "some", "list"],
            "additionalProperties": False,
            "$defs": {"Color": COLOR},
        },
    ),
]


@pytest.mark.parametrize("family", FORMATS)
def test_random_messages_of_the_grammar_are_valid_calls(family: str) -> None:
    tools = FORMATS[family].tools
    assert tools is not None
    grammar = grammar_of(tools).required(WALK_TOOLS, parallel=True)
    schemas: Mapping[str, Any] = {tool.name: tool.schema for tool in WALK_TOOLS}
    for seed in range(8 if family in TYPED else 3):
        closing = tools.syntax.parameters.after_value if tools.syntax.parameters else ""
        text = random_message(grammar, Random(seed), closing)
        message = parsed(tools, text, WALK_TOOLS)
        assert message.tool_calls, text
        assert message.content == "", text
        for call in message.tool_calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
