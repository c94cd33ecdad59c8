"""JSON schemas of clients: keywords that are written with others, errors with their place, and their cost."""

import contextlib
import json
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import pytest

from baton.core.errors import Reason, Refused
from baton.gateway.constraints.lark_writer import LarkWriter
from baton.gateway.grammar_checks.grammar_compiler import problem_of
from baton.gateway.input.answers.constraint_fields import is_read_in_thread, parse_constraint
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.schemas.schema_pattern import rust_pattern
from baton.gateway.input.schemas.schema_reader import read_schema
from baton.runtime.process import loop_time
from tests.cpu_time import CpuTime
from tests.unit.gateway.test_structured_output import content, demo_tokenizer, parsed, random_text
from tests.unit.gateway.test_tool_grammar import accepts

INT = {"type": "integer"}
NODE = {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "Node"}, {"type": "null"}]}}, "required": ["n"]}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def cat(kind: str, **more: Any) -> dict[str, Any]:
    """Return a model of pydantic with a default for its discriminator, which is therefore optional."""
    return {"type": "object", "properties": {"kind": {"const": kind, "default": kind}, **more}}


CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "anchor": ({"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "integer"}}}, [1], ["1"]),
    "id": ({"$id": "Node", "additionalProperties": False, **NODE}, [{"n": None}, {"n": {"n": None}}], [{"n": 1}]),
    "id in an id": (
        {"$id": "http://x/a", "$ref": "b#/$defs/c", "$defs": {"b": {"$id": "b", "$defs": {"c": INT}}}},
        [1],
        ["1"],
    ),
    "pointer to a part": ({"properties": {"a": INT, "b": {"$ref": "#/properties/a"}}, "type": "object"}, [], []),
    "pointer outside of schemas": (
        {"$ref": "#/components/schemas/A~1B", "components": {"schemas": {"A/B": INT}}},
        [1],
        [None],
    ),
    "reference to true": ({"$ref": "#/$defs/x", "$defs": {"x": True}, "type": "null"}, [None], [1]),
    "recursive root": (closed(c={"anyOf": [{"$ref": "#"}, {"type": "null"}]}), [{"c": {"c": None}}], [{"c": {}}]),
    "endless option": (
        {"$defs": {"x": closed(x={"$ref": "#/$defs/x"})}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]},
        [None],
        [{"x": {}}],
    ),
    "property names": (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": INT},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    "property names by reference": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"enum": ["a"]}}},
        [{"a": {"b": 1}}],
        [{"b": 1}],
    ),
    "pattern of names": ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"a1": 0}], [{"b": 0}]),
    "length of names": ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 0}], [{"abc": 0}]),
    "dependent": (
        {"type": "object", "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}},
        [{"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "dependent schema": (
        {"type": "object", "properties": {"a": INT, "b": INT}, "dependencies": {"a": {"required": ["b"]}}},
        [{}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "unevaluated": (
        {"type": "object", "properties": {"a": INT}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "never": ({"anyOf": [{"not": {}}, INT]}, [1], ["x"]),
    "trivial": ({"uniqueItems": False, "if": {}, "minContains": 2, "not": False, "type": "array"}, [[1, 1]], [1]),
    "draft 4": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    "draft 7": ({"items": [INT], "additionalItems": False, "type": "array"}, [[], [1]], [[1, 1], ["x"]]),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**62), 2**62], [2**64]),
    "inexact": ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
    "wide": ({"type": "number", "minimum": -1e308, "maximum": 1e308}, [0, 1e15], ["1"]),
    "narrow": ({"type": "number", "exclusiveMinimum": 1e-300, "maximum": 1}, [0.5], [0]),
    "inexact and exclusive": (
        {"type": "integer", "exclusiveMinimum": 2**53 + 1, "exclusiveMaximum": 2.0**53 + 8},
        [2**53 + 2, 2**53 + 6],
        [2**53, 2**53 + 8],
    ),
    "one of the properties": (
        {"type": "object", "properties": {"a": INT, "b": INT}, "additionalProperties": False, "minProperties": 1},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    "float lengths": ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ["ab"], ["a", "abcd"]),
    "huge": ({"type": "array", "maxItems": 10**30, "items": INT}, [[1]], [["x"]]),
    "annotations": ({"type": "string", "format": "password", "description": 3, "x": {"$ref": 1}}, ["a"], [1]),
    "formats": ({"type": "string", "format": "uuid4"}, ["123e4567-e89b-42d3-a456-426614174000"], ["x"]),
    "discriminator": (
        {"oneOf": [cat("a", x=INT), cat("b", y=INT)], "discriminator": {"propertyName": "kind"}},
        [{"kind": "a", "x": 1}, {"kind": "b"}],
        [{}, {"kind": "c"}],
    ),
    "discriminator by reference": (
        {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": cat("a"), "B": cat("b")}},
        [{"kind": "a"}, {"kind": "b"}],
        [{}],
    ),
    "types": ({"oneOf": [INT, {"type": "string"}, cat("a")]}, [1, "x", {"kind": "b"}][:2], [None]),
    "enum of names": ({"enum": ["\u00e9", "\U0001f600", '"', "\n"]}, ["\u00e9", '"'], ["x"]),
    "names": (
        closed(**{'na\u00efve \U0001f600 "\\/\n': INT, "": INT, "$ref": INT}),
        [{'na\u00efve \U0001f600 "\\/\n': 1, "": 2, "$ref": 3}],
        [],
    ),
    "long name": (closed(**{"x" * 2000: INT}), [{"x" * 2000: 1}], [{"x" * 1999: 1}]),
}


@pytest.mark.parametrize("name", CASES)
def test_schemas_mean_what_they_say(name: str) -> None:
    schema, right, wrong = CASES[name]
    written = content(parsed(guided_json=schema).rule)
    assert [accepts(written, json.dumps(value, ensure_ascii=False)) for value in right] == [True] * len(right)
    assert [accepts(written, json.dumps(value, ensure_ascii=False)) for value in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"draft 4", "draft 7", "long name"}))
def test_random_answers_match_schemas_that_were_rewritten(name: str) -> None:
    schema = CASES[name][0]
    written = content(parsed(guided_json=schema).rule)
    for seed in range(2):
        jsonschema.Draft202012Validator(schema).validate(json.loads(random_text(written, Random(seed))))


PLACE = "response_format.json_schema.schema at "
BAD: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"uniqueItems": True}}}, "/properties/a/uniqueItems is not supported; leave it out"),
    ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type is 'strin'; must be array, "),
    ({"type": []}, "/type is an empty list; must be array"),
    ({"items": {"if": {}, "then": {}}}, "/items/if is not supported"),
    ({"not": {"type": "null"}}, "/not is not supported"),
    ({"contains": INT}, "/contains is not supported"),
    ({"allOf": [{"$ref": "#/$defs/no"}]}, "/allOf/0/$ref is '#/$defs/no', which the schema does not have"),
    ({"$ref": "http://[x"}, "/$ref is 'http://[x', which"),
    ({"$ref": "#/required", "required": ["a"]}, "/$ref is '#/required', which is no schema"),
    ({"multipleOf": 1_000_003}, "/multipleOf is 1000003; must be at most 20,000"),
    ({"multipleOf": 0}, "/multipleOf is 0; must be above 0"),
    ({"minimum": 2**70}, "/minimum is a number of more than 64 bits; must be between"),
    ({"minimum": "1"}, "/minimum is '1'; must be a number"),
    ({"minLength": -1}, "/minLength is -1; must be an integer of at least 0"),
    ({"minItems": 1.5}, "/minItems is 1.5; must be an integer"),
    ({"anyOf": []}, "/anyOf is an empty list; must be a list of at least one schema"),
    ({"anyOf": [3]}, "/anyOf/0 is 3; must be an object, true or false"),
    ({"required": True}, "/required is true; must be a list of strings"),
    ({"properties": {"a~/b": {"pattern": 3}}}, "/properties/a~0~1b/pattern is 3; must be a regular expression"),
    ({"properties": {"\u00e9" * 500: 3}}, "is 3; must be an object"),
    ({"unevaluatedProperties": False, "allOf": [{}]}, "/unevaluatedProperties is not supported beside"),
    ({"$ref": "#"}, "matches no finite value"),
    (closed(a={"$ref": "#"}), "matches no finite value"),
    (
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "matches no finite value",
    ),
    ({"type": "object", "propertyNames": {"format": "uri"}}, "/propertyNames is supported with"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_errors_of_schemas_name_the_keyword_and_the_rule(number: int) -> None:
    schema, words = BAD[number]
    with pytest.raises(InvalidField) as refused:
        parsed(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    message = str(refused.value)
    assert (PLACE + words if words[0] == "/" else words) in message
    assert message.isascii()
    assert len(message) < 400
    assert refused.value.failure.reason is Reason.INVALID_GRAMMAR


def test_lenient_schemas_drop_what_cannot_be_enforced() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"not": {"type": "null"}, "if": {}, "then": {}}}
    assert read_schema("x", schema, lenient=True) == {"type": "array", "items": {}}
    with pytest.raises(InvalidField, match="minItems"):
        read_schema("x", {"minItems": "1"}, lenient=True)


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("[a[b]c]", r"[a\[b]c]"),
        ("[[:alpha:]]", r"[\[:alpha:]]"),
        ("[a&&b]", r"[a\&&b]"),
        ("[a~~b--c]", r"[a\~~b\--c]"),
        (r"[\[\]]x[^[]", r"[\[\]]x[^\[]"),
        ("a&&b", "a&&b"),
        ("[]a]", "[]a]"),
    ],
)
def test_classes_of_patterns_have_the_meaning_of_ecma(pattern: str, written: str) -> None:
    assert rust_pattern(pattern) == written


def inner(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with this one inside, and a property that cannot be, which llguidance leaves out."""
    none = {"type": "integer", "minimum": 5, "maximum": 1}
    return {"type": "object", "properties": {"none": none, "a/b": {"type": "array", "items": schema}}}


@pytest.mark.parametrize(
    ("body", "rule", "where", "words"),
    [
        (
            {"guided_json": inner({"type": "string", "pattern": "a(b"})},
            "r0",
            "/properties/a~1b/items/pattern",
            "character 2: unclosed",
        ),
        (
            {"guided_json": {"$ref": "#/$defs/x", "$defs": {"x": inner({"type": "string", "pattern": "("})}}},
            "r0",
            "/$defs/x/properties/a~1b/items/pattern",
            "unclosed",
        ),
        ({"guided_json": inner({"oneOf": [INT, {"type": "number"}]})}, "r0", "/properties/a~1b/items", "must differ"),
        (
            {"guided_json": closed(q=closed(r={"type": "integer", "minimum": 5, "maximum": 1}))},
            "r0",
            "/properties/q/properties/r",
            "no value can match: minimum (5) is greater than maximum (1)",
        ),
        ({"guided_json": {"patternProperties": {"a": INT, "b": {}}}}, "r0", "", "match the same names"),
        ({"guided_json": {"type": "string", "format": "date", "pattern": "^x$"}}, "r0", "", "no text matches pattern"),
        ({"guided_regex": "ab/(?=b)"}, "T0", "character 4", "look-around"),
        ({"guided_regex": r"a\b"}, "T0", "", "are not supported"),
        ({"guided_regex": r"[^\s\S]"}, "", "", "no text matches the grammar"),
        ({"guided_grammar": '\nstart: "a" b\nb: c'}, "", "line 3, column 4", "unknown name"),
    ],
)
def test_problems_of_the_compiler_say_where(body: dict[str, Any], rule: str, where: str, words: str) -> None:
    found = problem_of(content(parsed(**body).rule), demo_tokenizer())
    assert found is not None
    assert (found.rule, found.where) == (rule, where)
    assert words in found.message
    assert "%json" not in found.message


def test_problems_in_one_of_several_rules_name_its_place() -> None:
    tags = [{"begin": f"<{n}", "content": {"type": "regex", "pattern": p}, "end": ""} for n, p in enumerate(("a", "("))]
    body = {"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": tags}}}
    rule = parsed(structured_outputs=body).rule
    writer = LarkWriter({})
    written = writer.grammar(rule.expression(writer))
    found = problem_of(written.text, demo_tokenizer())
    assert found is not None
    assert written.places[found.rule] == "structured_outputs.structural_tag.format.tags[1].content.pattern"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "many references": {"anyOf": [{"$ref": "#/$defs/a"}] * 1500, "$defs": {"a": INT}},
    "chain of references": {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(1000)}},
    "references that multiply": {
        "$ref": "#/$defs/0",
        "$defs": {**{str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 50} for n in range(20)}, "20": INT},
    },
    "names that multiply": {
        "propertyNames": {"enum": [str(n) for n in range(3000)]},
        "additionalProperties": {"enum": ["x" * 20_000]},
    },
    "long names": {"properties": {"x" * 30_000: {"properties": {str(n): INT for n in range(1500)}}}},
    "many alternatives": {"oneOf": [cat(str(n)) for n in range(500)]},
    "many properties": {"type": "object", "properties": {f"p{n}": INT for n in range(2500)}},
    "deep": deep(14),
    "nested anchors": {"$defs": {str(n): {"$id": f"http://x/{n}", "$anchor": "a"} for n in range(1000)}, "$ref": "#"},
    "long pattern": {"pattern": "[[" * 8000},
    "large number": {"minimum": 10**4000, "maximum": 10**4000, "multipleOf": 10**4000},
    "many dependencies": {"dependentRequired": {str(n): ["x"] * 10 for n in range(900)}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_have_a_bounded_cost(name: str) -> None:
    """A read takes up to 15 ms of CPU; it is in a thread for large bodies."""
    with CpuTime() as cpu, contextlib.suppress(Refused):
        constraint = parse_constraint({"guided_json": HOSTILE[name]}, UnknownFields())
        assert constraint is not None
        assert len(content(constraint.rule)) < 1 << 20
    assert cpu.spent_s < 0.1


@pytest.mark.parametrize("item", [{}, {"minimum": 1, "maximum": 2}, {"$ref": "#/$defs/a"}, cat("x")])
def test_schemas_that_are_read_on_the_event_loop_are_cheap(item: dict[str, Any]) -> None:
    """The most expensive of these takes up to 3 ms."""
    count = loop_time.SCHEMA_BYTES // (len(json.dumps(item)) + 2)
    body = {"guided_json": {"anyOf": [item] * count, "$defs": {"a": INT}}}
    assert not is_read_in_thread(loop_time.SCHEMA_BYTES, body)
    assert is_read_in_thread(loop_time.SCHEMA_BYTES + 1, body)
    assert not is_read_in_thread(loop_time.SCHEMA_BYTES + 1, {"prompt": "x", "guided_json": None})
    assert min(_cost_s(lambda: parse_constraint(body, UnknownFields())) for _ in range(3)) < 0.012


def _cost_s(call: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    with CpuTime() as cpu:
        call()
    return cpu.spent_s
