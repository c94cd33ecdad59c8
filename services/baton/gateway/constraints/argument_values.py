"""Sorts the values that a parameter's schema allows: by what the parser tells from a text without quotes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.constraints.lark_writer import LarkWriter, escaped
from baton.gateway.constraints.number_pattern import number_pattern
from baton.gateway.constraints.object_shape import ONE_OF, ShapeReader
from baton.gateway.constraints.string_rules import StringRules, string_rules
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema
from baton.gateway.output.values.schema_alternatives import (
    ANNOTATIONS,
    MAX_ALTERNATIVES,
    alternatives,
    constants,
    kinds_of,
    parts_of,
    type_of,
    value_key,
)
from baton.gateway.output.values.schema_document import SchemaDocument

_NOT_STRINGS = ("object", "array", "boolean", "null", "number")
_PLAIN = ANNOTATIONS | {"type"}
NUMBERS = ("integer", "number")
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_MAX_STEPS = 256
_LARGEST_MULTIPLE = 10**15


@dataclass(frozen=True, slots=True)
class ArgumentValues:
    """The values of a parameter.

    strings: rules of its strings. Each is a kind of them.
    literals: strings that are listed.
    others: schemas of values that are no strings, each with one `type`.
    free_kinds: types whose values are all allowed.
    """

    strings: list[StringRules] = field(default_factory=list)
    literals: list[str] = field(default_factory=list)
    others: list[Mapping[str, Any]] = field(default_factory=list)
    free_kinds: set[str] = field(default_factory=set)

    def pattern_of(self, schema: Mapping[str, Any], *, lenient: bool) -> str:
        """Return a regular expression for one of `others` that is no object or list; else an empty text.

        Raises UnsupportedSchema if there is none, unless `lenient`.
        """
        kind = schema["type"]
        if kind in ("object", "array"):
            return ""
        if (values := constants(schema)) is not None:
            return "|".join(escaped(json.dumps(value)) for value in values)
        if kind in NUMBERS:
            return _number_pattern(schema, kind, lenient=lenient)
        return "null" if kind == "null" else "true|false"


def argument_values(
    schema: Any,
    document: SchemaDocument,
    reader: ShapeReader,
    tried: tuple[str, ...],
    *,
    untyped_json: bool,
    lenient: bool,
) -> ArgumentValues:
    """Return the values that a schema allows.

    tried: types that the parser tries. untyped_json: it tries all of them if it has none.

    Raises UnsupportedSchema if the schema cannot be enforced, unless `lenient`.
    """
    found = ArgumentValues()
    kinds = tuple(kind for kind in tried if kind != "string") if tried else _NOT_STRINGS if untyped_json else ()
    for each in kinds_of_value(schema, document, reader, lenient=lenient):
        values = constants(each)
        if values is not None:
            add_constants(found, each, values, lenient=lenient)
            continue
        own = kinds_of(each)
        for kind in own or ("string", *kinds):
            if kind == "string":
                found.strings.append(string_rules(each, lenient=lenient))
                continue
            found.others.append(each if each.get("type") == kind else {**each, "type": kind})
            if all(part.keys() <= _PLAIN for part in parts_of(each)):
                found.free_kinds.add(kind)
    return found


def written_number(writer: LarkWriter, schema: Mapping[str, Any], kind: str, *, lenient: bool, place: str) -> str:
    """Return an expression for a number, which has so few digits that the parser converts it exactly."""
    if not any("multipleOf" in part for part in parts_of(schema)):
        return writer.regex(_number_pattern(schema, kind, lenient=lenient))
    bounds = {"minimum": -_LARGEST_MULTIPLE, "maximum": _LARGEST_MULTIPLE}
    bounded = {"type": kind, "allOf": [schema, bounds]}
    return writer.json(bounded, lenient=lenient, coerce=lenient, place=place)


def _number_pattern(schema: Mapping[str, Any], kind: str, *, lenient: bool) -> str:
    try:
        return number_pattern(schema, integer=kind == "integer")
    except UnsupportedSchema:
        if not lenient:
            raise
        return number_pattern({}, integer=kind == "integer")


def kinds_of_value(
    schema: Any, document: SchemaDocument, reader: ShapeReader, *, lenient: bool
) -> list[Mapping[str, Any]]:
    """Return the alternatives of a schema.

    lenient: some of them if there are too many, and anything if `reader` has looked at too many schemas.
    Raises UnsupportedSchema otherwise.
    """
    if lenient and reader.is_exhausted:
        return [{}]
    if not lenient and (one_of := ambiguous_one_of(schema, document)) is not None:
        raise UnsupportedSchema(ONE_OF, "oneOf", one_of)
    found = alternatives(schema, document)
    reader.spend_alternatives(found.num_steps, found.schemas)
    if lenient and reader.is_exhausted:
        return [{}]
    if not found.is_complete and not lenient:
        message = f"the schema has too many alternatives; at most {MAX_ALTERNATIVES} are supported"
        raise UnsupportedSchema(message)
    return found.schemas


def add_constants(found: ArgumentValues, schema: Mapping[str, Any], values: list[Any], *, lenient: bool) -> None:
    """Add those of the listed values that follow the rules beside them."""
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        rules = string_rules(schema, lenient=lenient)
        most = len(max(texts, key=len)) if rules.most is None else rules.most
        texts = [text for text in texts if rules.least <= len(text) <= most]
        if texts and rules.patterns:
            found.strings.append(StringRules(patterns=(*rules.patterns, "|".join(map(escaped, texts)))))
        else:
            found.literals.extend(texts)
    parts = [part for part in parts_of(schema) if not part.keys() <= _PLAIN]
    others: dict[str, list[Any]] = {}
    for value in values:
        if not isinstance(value, str) and all(_is_within(value, part) for part in parts):
            others.setdefault(type_of(value), []).append(value)
    for kind, listed in others.items():
        more_rules = [part for part in parts if not part.keys() <= _PLAIN | {"enum", "const"}]
        joined = {"allOf": more_rules} if more_rules and kind in ("object", "array") else {}
        found.others.append({"type": kind, "enum": listed, **joined})


def _is_within(value: Any, schema: Mapping[str, Any]) -> bool:
    """True if a number is within the bounds of a schema, and for all other values."""
    if not isinstance(value, int | float) or isinstance(value, bool) or _BOUNDS.isdisjoint(schema):
        return True
    multiple = schema.get("multipleOf")
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and (multiple is None or value % multiple == 0)
    )


def ambiguous_one_of(schema: Any, document: SchemaDocument) -> Any:
    """Return a `oneOf` of which a value may match several schemas; None if there is none."""
    waiting, followed = [schema], set()
    for _ in range(_MAX_STEPS):
        if not waiting:
            break
        current = waiting.pop()
        if not isinstance(current, Mapping):
            continue
        choices = current.get("oneOf")
        if isinstance(choices, list) and len(choices) > 1 and not _are_distinct(choices):
            return choices
        for name in ("allOf", "anyOf", "oneOf"):
            waiting += current[name] if isinstance(current.get(name), list) else []
        reference = current.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(document.resolve(reference))
    return None


def _are_distinct(schemas: list[Any]) -> bool:
    """True if schemas list their values, and have none in common."""
    seen: set[str] = set()
    for schema in schemas:
        values = constants(schema) if isinstance(schema, Mapping) else None
        texts = set(map(value_key, values or ()))
        if values is None or texts & seen:
            return False
        seen |= texts
    return True
