"""Writes grammars of arguments that are not JSON: parameters between delimiters, and Gemma's objects."""

import json
from collections.abc import Mapping
from typing import Any

from baton.gateway.constraints.lark_writer import LarkWriter
from baton.gateway.output.formats import ParameterSyntax

_SCALARS = ("integer", "number", "boolean", "null")
MAX_LENGTH = 1000
"""Largest bound of a string's length that is enforced in text without quotes."""
_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"


def parameters(writer: LarkWriter, syntax: ParameterSyntax, schema: Mapping[str, Any], *, lenient: bool) -> str:
    """Return an expression for parameters between delimiters, in the order of the schema.

    Values of strings are any text. A schema without properties allows any parameters.
    """
    properties = _properties(schema)
    if not properties:
        if schema.get("additionalProperties", True) is False or not schema:
            return '""'
        key = f"{writer.text(syntax.before_key)} {_KEY} {writer.text(syntax.after_key)}"
        return f"({key} {writer.text_until(syntax.after_value)})*"
    required = _required(schema)
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts: list[str] = []
    for name, value in properties.items():
        begin = f"{writer.text(syntax.before_key)} {json.dumps(name)} {writer.text(syntax.after_key)}"
        one = f"({begin} {_parameter(writer, syntax, {**value, **definitions}, lenient=lenient)})"
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)


def _parameter(writer: LarkWriter, syntax: ParameterSyntax, schema: Mapping[str, Any], *, lenient: bool) -> str:
    """Return an expression for a value and the delimiter after it."""
    if choices := _strings(schema):
        return f"({' | '.join(map(json.dumps, choices))}) {writer.text(syntax.after_value)}"
    if (string := _string_schema(schema)) is not None:
        return writer.text_until(syntax.after_value, *_lengths(string))
    if not schema.keys() & {
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
    }:
        return writer.text_until(syntax.after_value)
    return f"{writer.json(schema, lenient=lenient)} {writer.text(syntax.after_value)}"


def gemma_object(writer: LarkWriter, delimiter: str, schema: Mapping[str, Any], *, lenient: bool) -> str:
    """Return an expression for an object in Gemma's form: bare keys, and strings between `delimiter`s."""
    properties = _properties(schema)
    if not properties:
        if schema.get("additionalProperties", True) is False or not schema:
            return '"{}"'
        return _any_gemma(writer, delimiter, "object")
    return f'"{{" {_members(writer, delimiter, properties, _required(schema), lenient=lenient)} "}}"'


def _members(
    writer: LarkWriter,
    delimiter: str,
    properties: Mapping[str, Mapping[str, Any]],
    required: frozenset[str],
    *,
    lenient: bool,
) -> str:
    """Return an expression for the members of an object in the order of their names, with commas between
    them."""
    first = later = '""'  # the members from a name on, as the first ones and after others
    for name in sorted(properties, reverse=True):
        value = _gemma_value(writer, delimiter, properties[name], lenient=lenient)
        member = f"{json.dumps(name + ':')} {value} {later}"
        or_first, or_later = ("", "") if name in required else (f" | {first}", f" | {later}")
        first, later = writer.rule(member + or_first), writer.rule(f'"," {member}{or_later}')
    return first


def _gemma_value(writer: LarkWriter, delimiter: str, schema: Mapping[str, Any], *, lenient: bool) -> str:
    quote = writer.text(delimiter)
    if choices := _strings(schema):
        return "(" + " | ".join(f"{quote} {json.dumps(choice)} {quote}" for choice in choices) + ")"
    if alternatives := _alternatives(schema):
        values = [_gemma_value(writer, delimiter, each, lenient=lenient) for each in alternatives]
        return f"({' | '.join(values)})"
    kind = schema.get("type")
    if kind == "string":
        return f"({quote} {writer.text_until(delimiter, *_lengths(schema))})"
    if kind in _SCALARS:
        return writer.json(schema, lenient=lenient)
    if kind == "object":
        return f"({gemma_object(writer, delimiter, schema, lenient=lenient)})"
    items = schema.get("items")
    if kind == "array" and isinstance(items, Mapping) and items:
        item = _gemma_value(writer, delimiter, items, lenient=lenient)
        return f'("[" ({item} ("," {item})*)? "]")'
    return _any_gemma(writer, delimiter, "value")


def _alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas of which one applies, for a schema with several types; nothing for one type."""
    for name in ("anyOf", "oneOf"):
        found = schema.get(name)
        if isinstance(found, list) and found and all(isinstance(each, Mapping) for each in found):
            return found
    kinds = schema.get("type")
    if isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds):
        return [{**schema, "type": kind} for kind in kinds]
    return []


def _string_schema(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema of strings, if a value may be a string among others; else None.

    Such a value is text without quotes, from which the parser tells its type.
    """
    if schema.get("type") == "string":
        return schema
    return next((found for each in _alternatives(schema) if (found := _string_schema(each)) is not None), None)


def _any_gemma(writer: LarkWriter, delimiter: str, rule: str) -> str:
    """Return an expression for any object or value."""
    quote = writer.text(delimiter)
    string = f"{quote} {writer.text_until(delimiter)}"
    scalar = writer.json({"type": list(_SCALARS)}, lenient=False)
    writer.fixed_rule("gemma_value", f'{string} | {scalar} | gemma_object | "[" (gemma_value ("," gemma_value)*)? "]"')
    member = f'{_KEY} ":" gemma_value'
    writer.fixed_rule("gemma_object", f'"{{" ({member} ("," {member})*)? "}}"')
    return f"gemma_{rule}"


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the schemas of an object's properties. One that is no object allows anything."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: value if isinstance(value, Mapping) else {} for name, value in properties.items()}


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    required = schema.get("required")
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def _strings(schema: Mapping[str, Any]) -> list[str]:
    """Return the only values of a schema if all of them are strings; nothing otherwise."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        return []
    return values


def _lengths(schema: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the bounds for the characters of a string. Larger ones than a text regular expression can count
    are left out."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    least = least if isinstance(least, int) and 0 <= least <= MAX_LENGTH else 0
    return least, most if isinstance(most, int) and least <= most <= MAX_LENGTH else None
