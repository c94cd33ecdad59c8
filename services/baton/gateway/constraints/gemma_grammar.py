"""Writes grammars of Gemma's objects: bare keys, and strings between delimiters."""

import json
from collections.abc import Mapping
from typing import Any

from baton.gateway.constraints.lark_writer import LarkWriter
from baton.gateway.constraints.object_shape import KEY, object_shape, string_rules
from baton.gateway.output.values.schema_alternatives import constants, merged, resolve_reference, rest_of

_SCALARS = ("integer", "number", "boolean", "null")
_COMMA = ' "," '
_MAX_ITEMS = 1000
"""Largest bound of a list's length that is enforced."""


class GemmaGrammar:
    """Grammar of the arguments of one tool. Members come in the order of their names."""

    def __init__(self, writer: LarkWriter, delimiter: str, root: Mapping[str, Any], *, lenient: bool) -> None:
        self._writer = writer
        self._delimiter = delimiter
        self._quote = writer.text(delimiter)
        self._root = root
        self._lenient = lenient
        self._references: dict[str, str] = {}

    def expression(self) -> str:
        """Return an expression for the arguments."""
        return self._object(self._root)

    def _object(self, schema: Mapping[str, Any]) -> str:
        shape = object_shape(schema, self._root)
        if shape.properties:
            return f'"{{" {self._members(shape.properties, shape.required)} "}}"'
        if shape.others is None:
            return '"{}"'
        if not shape.others:
            return self._anything("object")
        member = f'{KEY} ":" {self._value(shape.others)}'
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _members(self, properties: Mapping[str, Any], required: frozenset[str]) -> str:
        """Return an expression for the members of an object, with commas between them."""
        writer = self._writer
        first = later = '""'  # the members from a name on, as the first ones and after others
        for name in sorted(properties, reverse=True):
            member = writer.counted(f"{json.dumps(name + ':')} {self._value(properties[name])} {later}")
            or_first, or_later = ("", "") if name in required else (f" | {first}", f" | {later}")
            first, later = writer.rule(member + or_first), writer.rule(f'"," {member}{or_later}')
        return first

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._anything("value")
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference)
        if (values := constants(schema)) is not None:
            return f"({' | '.join(map(self._literal, values))})"
        every = schema.get("allOf")
        if isinstance(every, list) and len(every) == 1:
            return self._value(every[0])
        if choices := _choices(schema):
            return f"({' | '.join(map(self._value, choices))})"
        return self._typed(schema)

    def _typed(self, schema: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        if kind == "string":
            pattern = self._writer.pattern(schema, lenient=self._lenient)
            return f"({self._quote} {self._writer.text_until(self._delimiter, *string_rules(schema), pattern)})"
        if kind in _SCALARS:
            return self._writer.json(schema, lenient=self._lenient, definitions=self._root)
        if kind == "object":
            return f"({self._object(schema)})"
        if kind == "array" and "prefixItems" not in schema:
            return self._list(schema)
        return self._anything("value")

    def _list(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        least, most = schema.get("minItems"), schema.get("maxItems")
        least = least if isinstance(least, int) and 0 < least <= _MAX_ITEMS else 0
        most = most if isinstance(most, int) and least <= most <= _MAX_ITEMS else None
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'("[" {item} {more} "]")' if least else f'("[" ({item} {more})? "]")'

    def _reference(self, reference: str) -> str:
        """Return the rule of a reference, which may contain itself."""
        known = self._references.get(reference)
        if known is None:
            known = self._references[reference] = self._writer.reserve()
            self._writer.fixed_rule(known, self._value(resolve_reference(reference, self._root)))
        return known

    def _literal(self, value: Any) -> str:
        """Return an expression for one value."""
        if isinstance(value, str):
            return f"({self._quote} {json.dumps(value)} {self._quote})"
        if isinstance(value, list):
            return f'("[" {_COMMA.join(map(self._literal, value))} "]")'
        if isinstance(value, Mapping):
            members = (f"{json.dumps(name + ':')} {self._literal(value[name])}" for name in sorted(value))
            return f'("{{" {_COMMA.join(members)} "}}")'
        return json.dumps(json.dumps(value))

    def _anything(self, rule: str) -> str:
        """Return an expression for any object or value."""
        writer = self._writer
        string = f"{self._quote} {writer.text_until(self._delimiter)}"
        scalar = writer.json({"type": list(_SCALARS)}, lenient=False)
        items = '"[" (gemma_value ("," gemma_value)*)? "]"'
        writer.fixed_rule("gemma_value", f"{string} | {scalar} | gemma_object | {items}")
        member = f'{KEY} ":" gemma_value'
        writer.fixed_rule("gemma_object", f'"{{" ({member} ("," {member})*)? "}}"')
        return f"gemma_{rule}"


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of which one applies, for a schema with several types; nothing for one type."""
    for name in ("anyOf", "oneOf"):
        found = schema.get(name)
        if isinstance(found, list) and found:
            rest = rest_of(schema, name)
            return [merged(rest, each) for each in found]
    if schema.get("nullable"):
        return [rest_of(schema, "nullable"), {"type": "null"}]
    kinds = schema.get("type")
    if isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds):
        rest = rest_of(schema, "type")
        return [{**rest, "type": kind} for kind in kinds]
    return []
