"""Keywords of JSON Schema in strict tools: each is enforced in each format of calls, or refused by name.

The judge is jsonschema: what the parser reads from a message that the grammar allows is valid.
"""

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from baton.gateway.constraints.gbnf import GrammarTextError
from baton.gateway.constraints.lark_writer import WrittenGrammar
from baton.gateway.constraints.message_grammar import CallableTool
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.schemas.schema_reader import read_schema
from tests.random_schemas import random_schema
from tests.scale import sized
from tests.unit.gateway.grammar_cases import accepts, grammar_of, parsed, random_message
from tests.unit.gateway.output.output_cases import FORMATS, written, written_call

UNQUOTED = ("qwen3_coder", "seed_oss", "glm45", "glm47", "minimax_m2")
TYPED = (*UNQUOTED, "deepseek_v32", "deepseek_v4", "gemma4", "functiongemma")
SIMILAR = {"seed_oss", "glm45", "minimax_m2", "deepseek_v32"}
"""Formats that are written like another one, with other words. They run in `make test-long` only."""
each_typed = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.long) if family in SIMILAR else family for family in TYPED]
)
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
S, N, A, O = ({"type": kind} for kind in ("string", "number", "array", "object"))  # noqa: E741
CLOSED = {**O, "additionalProperties": False}

PARAMETERS: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("type", {"type": ["boolean", "null"]}, [True, None], [3, "x"]),
    ("enum", {"enum": ["red", 2, None]}, ["red", 2, None], ["blue", 3]),
    ("enum", {"enum": ["red", 2], **S}, ["red"], [2, "blue"]),
    ("enum", {"enum": ["a", "bbb"], "maxLength": 2}, ["a"], ["bbb"]),
    ("enum", {"enum": [1, 5], "minimum": 3}, [5], [1]),
    ("enum", {"anyOf": [{"enum": [""]}, {**S, "minLength": 3}]}, ["", "abc"], ["y"]),
    ("enum", {"anyOf": [{"enum": ["", "x"]}, {**S, "minLength": 3}]}, ["", "x", "abc"], ["y"]),
    ("const", {"const": "x"}, ["x"], ["y", 1]),
    ("minLength", {**S, "minLength": 2}, ["ab"], ["a"]),
    ("maxLength", {**S, "maxLength": 1500}, ["a" * 1500], ["a" * 1501]),
    ("pattern", {**S, "pattern": "^[a-c]+$"}, ["abc"], ["abd"]),
    ("format", {**S, "format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
    ("format", {**S, "format": "time"}, ["12:30:00Z"], ["12:30", "x"]),
    ("format", {**S, "format": "date-time"}, ["2024-02-29T12:30:00.5+01:00"], ["2024-02-29", "x"]),
    ("format", {**S, "format": "duration"}, ["P1DT2H", "P3W"], ["P", "x"]),
    ("format", {**S, "format": "email"}, ["a.b@c.de"], ["a", "@b"]),
    ("format", {**S, "format": "hostname"}, ["a-b.c"], ["-a", "a_b"]),
    ("format", {**S, "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256"]),
    ("format", {**S, "format": "ipv6"}, ["::1", "2001:db8::7"], ["1:2", ":::"]),
    ("format", {**S, "format": "uri"}, ["https://a.b/c?d#e"], ["//a", "a b"]),
    ("format", {**S, "format": "uuid"}, ["0f8fad5b-d9cb-469f-a165-70867728950e"], ["0f8fad5b"]),
    ("format", {**S, "format": "uuid", "pattern": "^0"}, ["0f8fad5b-d9cb-469f-a165-70867728950e"], ["1", "0"]),
    ("maxLength", {**S, "format": "date", "maxLength": 9}, [], []),
    ("minLength", {**S, "minLength": 16, "allOf": [{"format": "ipv4"}]}, [], []),
    ("format", {**S, "minLength": 9, "maxLength": 9, "format": "time"}, ["12:30:00Z"], ["12:30:00.1Z"]),
    ("minimum", {**N, "minimum": 2.5}, [2.5, 3], [2, 2.4]),
    ("maximum", {**N, "maximum": 2}, [2, -7.5], [2.1]),
    ("exclusiveMinimum", {**N, "exclusiveMinimum": 2}, [2.5], [2]),
    ("exclusiveMaximum", {**N, "exclusiveMaximum": 2}, [1.5], [2]),
    ("multipleOf", {**N, "multipleOf": 3}, [6], [7]),
    ("items", {**A, "items": DIGIT}, [[1, 2]], [[10], ["x"], "x"]),
    ("prefixItems", {**A, "prefixItems": [DIGIT, S], "minItems": 2}, [[1, "x"]], [["x", 1], [1]]),
    ("minItems", {**A, "items": DIGIT, "minItems": 2}, [[1, 2]], [[1]]),
    ("maxItems", {**A, "items": DIGIT, "maxItems": 1}, [[1]], [[1, 2]]),
    ("minItems", {**A, "prefixItems": [S], "items": DIGIT, "minItems": 2, "maxItems": 3}, [["x", 1]], [["x"]]),
    ("unevaluatedItems", {**A, "prefixItems": [DIGIT], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ("properties", {**CLOSED, "properties": {"x": DIGIT}}, [{"x": 1}], [{"x": 10}, {"y": 1}]),
    ("required", {**CLOSED, "properties": {"x": DIGIT}, "required": ["x"]}, [{"x": 1}], [{}]),
    ("patternProperties", {**CLOSED, "patternProperties": {"^p": DIGIT}}, [{"p1": 1}], [{"p1": "x"}, {"q": 1}]),
    ("propertyNames", {**O, "propertyNames": {"enum": ["k", "l"]}}, [{"k": 1}], [{"m": 1}]),
    ("minProperties", {**CLOSED, "properties": {"x": DIGIT, "y": DIGIT}, "minProperties": 1}, [{"y": 1}], [{}]),
    ("maxProperties", {**O, "additionalProperties": DIGIT, "maxProperties": 1}, [{"k": 1}], [{"k": 1, "l": 2}]),
    ("additionalProperties", {**O, "additionalProperties": DIGIT}, [{"k": 1}], [{"k": "x"}]),
    ("dependentRequired", {**CLOSED, "properties": {"x": DIGIT, "y": DIGIT}, "dependentRequired": {"x": ["y"]}},
     [{"x": 1, "y": 2}, {"y": 1}], [{"x": 1}]),
    ("dependentSchemas", {**O, "properties": {"x": DIGIT}, "dependentSchemas": {"x": {"required": ["y"]}}},
     [{"x": 1, "y": 2}], [{"x": 1}]),
    ("allOf", {**S, "allOf": [{"minLength": 2, "pattern": "^a"}, {"minLength": 1, "pattern": "b$"}]}, ["ab"],
     ["a", "b", "ba"]),
    ("allOf", {"allOf": [{"enum": ["a", "b", 1]}, {"enum": ["b", "c", 1]}]}, ["b", 1], ["a", "c"]),
    ("allOf", {**N, "minimum": 1, "allOf": [{"minimum": 3}, {"maximum": 9}, {"maximum": 5}]}, [3, 5], [2, 6]),
    ("anyOf", {**S, "maxLength": 3, "anyOf": [{"maxLength": 5, "pattern": "^a"}, {"const": "b"}]}, ["a", "b"],
     ["abcd", "c"]),
    ("anyOf", {"anyOf": [{**S, "maxLength": 3}, {**N, "minimum": 1000}]}, ["abc", 1000, 2000.5], [7, "abcd"]),
    ("anyOf", {"anyOf": [{**S, "format": "date"}, {**DIGIT, "minimum": 3}]}, ["2024-01-01", 5], [2, 11]),
    ("oneOf", {"oneOf": [{"const": "a"}, {"const": 1}]}, ["a", 1], ["b", 2]),
    ("not", {"not": {}}, [], []),
    ("$ref", {"$ref": "#/$defs/D", "maximum": 5}, [5], [6]),
    ("$ref", {"$ref": "#digit"}, [7], [10, "x"]),
    ("contains", {**A, "contains": DIGIT}, [], []),
    ("uniqueItems", {**A, "uniqueItems": True}, [], []),
    ("if", {"if": S, "then": {"maxLength": 1}}, [], []),
    ("oneOf", {"oneOf": [{**S, "maxLength": 3}, {**S, "minLength": 2}]}, [], []),
    ("not", {"not": S}, [], []),
    ("$dynamicRef", {"$dynamicRef": "#x"}, [], []),
    ("pattern", {**S, "pattern": "(?=a)b"}, [], []),
    ("minProperties", {**O, "minProperties": 2}, [], []),
    ("description", {**S, "description": "d", "default": 1, "examples": [2], "readOnly": True}, ["x"], []),
    ("contentEncoding", {**S, "contentEncoding": "base64", "contentMediaType": "text/plain"}, ["x"], []),
]  # fmt: skip
"""A keyword, the schema of a parameter, values that it allows, and that it forbids. Neither: refused."""

WHOLE: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("patternProperties", {**CLOSED, "patternProperties": {"^p[0-9]$": DIGIT}}, [{"p1": 1, "p2": 2}, {}],
     [{"p1": "x"}, {"q": 1}, {"p12": 1}]),
    ("patternProperties", {**CLOSED, "properties": {"pa": {"maximum": 5}}, "patternProperties": {"^p": DIGIT}},
     [{"pa": 5, "pb": 9}], [{"pa": 6}, {"pa": 1, "pb": 10}, {"q": 1}]),
    ("propertyNames", {**O, "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": DIGIT},
     [{"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}]),
    ("minProperties", {**CLOSED, "properties": {"a": DIGIT, "b": DIGIT, "c": DIGIT}, "minProperties": 2},
     [{"a": 1, "b": 2}, {"b": 1, "c": 2}], [{"b": 1}, {}]),
    ("maxProperties", {**CLOSED, "properties": {"a": DIGIT, "b": DIGIT, "c": DIGIT}, "maxProperties": 1},
     [{"c": 1}, {}], [{"a": 1, "c": 2}]),
    ("minProperties", {**O, "additionalProperties": DIGIT, "minProperties": 1}, [{"k": 1}], [{}]),
    ("enum", {"enum": [{"a": 1}, {"a": 2, "b": "x"}]}, [{"a": 1}, {"a": 2, "b": "x"}], [{"a": 2}, {"b": "x"}]),
    ("dependentSchemas", {**CLOSED, "properties": {"a": DIGIT, "b": {}},
                          "dependentSchemas": {"a": {"properties": {"b": DIGIT}}}},
     [{"a": 1, "b": 2}], [{"a": 1, "b": "x"}]),
    ("oneOf", {**CLOSED, "properties": {"a": DIGIT, "b": DIGIT},
               "oneOf": [{"required": ["a"], "properties": {"b": False}}, {"required": ["b"]}]},
     [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}], [{}]),
    ("allOf", {**O, "properties": {"a": {**S, "maxLength": 3}}, "required": ["a"],
               "allOf": [{"properties": {"a": {"minLength": 2}, "b": DIGIT}, "required": ["b"]}]},
     [{"a": "xy", "b": 1}], [{"a": "x", "b": 1}, {"a": "xy"}]),
    ("oneOf", {**O, "properties": {"a": DIGIT}, "oneOf": [{"required": ["a"]}, {"minProperties": 0}]}, [], []),
    ("unevaluatedProperties", {**O, "allOf": [{"properties": {"a": DIGIT}}], "unevaluatedProperties": False}, [], []),
]  # fmt: skip
"""The same for the schema of all arguments."""


def grammar_for(family: str, sent: dict[str, Any]) -> WrittenGrammar:
    """Return the grammar of a strict tool. Raises GrammarTextError or InvalidField if it is refused."""
    tools = FORMATS[family].tools
    assert tools is not None
    tool = CallableTool(name="f", parameters=read_schema("tools[0]", sent), strict=True, sent=sent)
    grammar = grammar_of(tools).required([tool], parallel=False)
    if error := LLMatcher.validate_grammar(grammar.text, None):
        raise GrammarTextError(error)
    return grammar


def check(family: str, keyword: str, sent: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    tools = FORMATS[family].tools
    assert tools is not None
    if not right and not wrong:
        with pytest.raises((GrammarTextError, InvalidField), match=rf"(?s)/{keyword.replace('$', '.')}\b|no object"):
            grammar_for(family, sent)
        return
    grammar = grammar_for(family, sent)
    validator = jsonschema.Draft202012Validator({"type": "object", **sent})
    for arguments in (*right, *wrong):
        assert validator.is_valid(arguments) is (arguments in right) or "format" in keyword, arguments
        text = written_call(tools, "f", written(tools, arguments))
        (call,) = parsed(tools, text, [CallableTool(name="f", parameters=sent)]).tool_calls
        if arguments in right:
            assert accepts(grammar, text), arguments
            assert json.loads(call.arguments) == arguments
        elif json.loads(call.arguments) == arguments:  # else it cannot be written
            assert not accepts(grammar, text), arguments


@each_typed
def test_keyword_of_a_parameter_is_enforced_or_refused(family: str) -> None:
    definitions = {"D": {**DIGIT, "$anchor": "digit"}}
    for keyword, schema, right, wrong in PARAMETERS:
        sent = {**CLOSED, "properties": {"a": schema}, "required": ["a"], "$defs": definitions}
        check(family, keyword, sent, [{"a": value} for value in right], [{"a": value} for value in wrong])


@each_typed
def test_keyword_of_all_arguments_is_enforced_or_refused(family: str) -> None:
    for keyword, schema, right, wrong in WHOLE:
        check(family, keyword, schema, right, wrong)


@pytest.mark.parametrize("family", UNQUOTED)
def test_text_that_may_be_a_string_or_a_number_is_a_number(family: str) -> None:
    tools = FORMATS[family].tools
    assert tools is not None
    for schema in (
        {"type": ["string", "integer"]},
        {"anyOf": [S, {"type": "integer", "maximum": 6}]},
        {"anyOf": [{"const": 6}, S]},
        {"enum": ["6", 6]},
    ):
        sent = {**CLOSED, "properties": {"a": schema}, "required": ["a"]}
        text = written_call(tools, "f", written(tools, {"a": "6"}))
        assert accepts(grammar_for(family, sent), text)
        (call,) = parsed(tools, text, [CallableTool(name="f", parameters=sent)]).tool_calls
        assert json.loads(call.arguments) == {"a": 6}


# Random schemas and random messages.

LEAVES: tuple[dict[str, Any], ...] = (
    S, {**S, "minLength": 1, "maxLength": 3}, DIGIT, {**N, "exclusiveMinimum": -1, "maximum": 2.5}, N,
    {"type": "boolean"}, {"type": "null"}, {"enum": ["a", 1, None, True, "7"]}, {"const": 5}, {"type": "integer"},
    {**S, "format": "date"}, {**S, "pattern": "^[0-9]{1,3}$"}, {"minimum": 3}, {"minLength": 2, "maxLength": 4}, {},
    {**A, "items": DIGIT, "maxItems": 2}, {**CLOSED, "properties": {"x": DIGIT}, "required": ["x"]},
    {"enum": ["x", "true", "1", "null", "2.5"]}, {"type": ["string", "null", "integer"], "maximum": 4, "maxLength": 2},
    {**N, "multipleOf": 0.5, "minimum": 0, "maximum": 4},
)  # fmt: skip
NAMES = ("a", "b", "p1", "p2", "x y", "k-1", "Z", "$ref")


def random_value(rng: Random, depth: int) -> dict[str, Any]:
    """Return a schema of a value, with rules beside unions and references."""
    kind = rng.random()
    if kind < 0.5 or not depth:
        return dict(rng.choice(LEAVES))
    if kind < 0.65:
        return {"anyOf": [random_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind < 0.72:
        return {"allOf": [random_value(rng, depth - 1) for _ in range(2)]}
    if kind < 0.77:
        return {**random_value(rng, 0), "anyOf": [random_value(rng, 0), random_value(rng, 0)]}
    if kind < 0.87:
        return {"$ref": "#/$defs/D"} | ({"maxLength": 2} if rng.random() < 0.5 else {})
    return random_object(rng, depth - 1)


def random_object(rng: Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema of an object with rules for the names and the number of its members."""
    names = rng.sample(NAMES, rng.randint(0, 4))
    found: dict[str, Any] = {**O, "properties": {name: random_value(rng, depth) for name in names}}
    found["required"] = [name for name in names if rng.random() < 0.5]
    more: list[dict[str, Any]] = [
        {"additionalProperties": random_value(rng, 0)},
        {"patternProperties": {rng.choice(("^p[0-9]$", "1$", "^x")): random_value(rng, 0)}},
        {"minProperties": rng.randint(0, 3)},
        {"maxProperties": rng.randint(1, 3)},
        {"propertyNames": rng.choice(({"maxLength": 2}, {"enum": ["a", "b", "q"]}, {"pattern": "^[ab]"}))},
        {"dependentRequired": {"a": ["zz"]}},
        {"anyOf": [{"required": ["a"]}, {"properties": {"b": random_value(rng, 0)}, "required": ["b"]}]},
        {"allOf": [{"properties": {name: random_value(rng, 0) for name in NAMES[:2]}}]},
    ]
    found |= {"additionalProperties": False} if rng.random() < 0.5 else {}
    for keywords in more:
        found |= keywords if rng.random() < 0.15 else {}
    return found


@each_typed
def test_random_messages_match_the_random_schema_of_a_strict_tool(family: str) -> None:
    tools = FORMATS[family].tools
    assert tools is not None
    closing = tools.syntax.parameters.after_value if tools.syntax.parameters else ""
    num_calls = 0
    for seed in range(sized(24, 1500)):
        rng = Random(seed)
        sent = {**random_object(rng), "$defs": {"D": random_value(rng, 0)}} if seed % 3 else random_schema(seed)
        if sent.get("type") != "object":
            continue
        try:
            grammar = grammar_for(family, sent)
            text = random_message(grammar, rng, closing, 300)
        except (InvalidField, GrammarTextError, AssertionError, IndexError):
            continue  # refused, without end, or a member without a value
        (call,) = parsed(tools, text, [CallableTool(name="f", parameters=sent)]).tool_calls
        jsonschema.Draft202012Validator(sent, format_checker=jsonschema.FormatChecker()).validate(
            json.loads(call.arguments)
        )
        num_calls += 1
    assert num_calls >= sized(8, 500)
