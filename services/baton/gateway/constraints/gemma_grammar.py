"""Writes grammars of Gemma's objects: bare keys, and strings between delimiters."""

import json
from collections.abc import Mapping
from typing import Any

from baton.gateway.constraints.lark_writer import LarkWriter
from baton.gateway.constraints.object_shape import (
    KEY,
    ObjectShape,
    ShapeReader,
    UnsupportedSchema,
    has_rules,
    string_rules,
)
from baton.gateway.constraints.schema_conjunction import is_nothing, joined
from baton.gateway.output.values.schema_alternatives import constants, merged, resolve_reference, rest_of, types_of

_SCALARS = ("integer", "number", "boolean", "null")
_COMMA = ' "," '
_MAX_ITEMS = 1000
"""Largest bound of a list's length that is enforced."""
_MAX_JOINED = 256
_MAX_JOINED_DEPTH = 24
"""Values to which several schemas apply: of one tool, and within each other. Recursive ones have no end."""


class GemmaGrammar:
    """Grammar of the arguments of one tool. Members come in the order of their names."""

    def __init__(
        self,
        writer: LarkWriter,
        reader: ShapeReader,
        delimiter: str,
        root: Mapping[str, Any],
        *,
        lenient: bool,
    ) -> None:
        self._writer = writer
        self._delimiter = delimiter
        self._quote = writer.text(delimiter)
        self._root = root
        self._lenient = lenient
        self._reader = reader
        self._references: dict[str, str] = {}
        self._num_joined = self._depth = 0

    def expression(self) -> str:
        """Return an expression for the arguments.

        Raises UnsupportedSchema if the schema cannot be enforced, and the tool is strict.
        """
        return self._object(self._root)

    def _object(self, schema: Mapping[str, Any]) -> str:
        shapes = self._reader.shapes(schema, self._root, lenient=self._lenient)
        found = dict.fromkeys(map(self._shape, shapes))
        return f"({' | '.join(found)})" if len(found) > 1 else next(iter(found))

    def _shape(self, shape: ObjectShape) -> str:
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
        reference = schema.get("$ref")
        if isinstance(reference, str) and not has_rules(rest_of(schema, "$ref")):
            return self._reference(reference)
        if (values := constants(schema)) is not None:
            return f"({' | '.join(map(self._literal, values))})"
        if "allOf" in schema or reference is not None:
            return self._several(schema)
        if choices := _choices(schema):
            return f"({' | '.join(map(self._value, choices))})"
        return self._typed(schema)

    def _several(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a value to which several schemas apply."""
        self._num_joined += 1
        if self._num_joined > _MAX_JOINED or self._depth == _MAX_JOINED_DEPTH:
            return self._unsupported("so many allOf and rules beside $ref")
        self._depth += 1
        expression = self._joined(schema)
        self._depth -= 1
        return expression

    def _joined(self, schema: Mapping[str, Any]) -> str:
        every = schema.get("allOf")
        if isinstance(every, list) and len(every) == 1 and not has_rules(rest_of(schema, "allOf")):
            return self._value(every[0])
        kinds = types_of(schema, self._root)
        if kinds and set(kinds) <= set(_SCALARS):
            return self._writer.json(schema, lenient=self._lenient, definitions=self._root)
        if kinds == ["object"]:
            return f"({self._object(schema)})"
        found = joined(schema, self._root)
        if found is None:
            return self._unsupported("allOf and rules beside $ref")
        return self._value(found)

    def _unsupported(self, what: str) -> str:
        if not self._lenient:
            raise UnsupportedSchema(f"this model's calls cannot enforce {what}; write it as one schema")
        return self._anything("value")

    def _typed(self, schema: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        if kind == "string":
            pattern = self._writer.pattern(schema, lenient=self._lenient)
            return f"({self._quote} {self._writer.text_until(self._delimiter, *string_rules(schema), pattern)})"
        if kind in _SCALARS:
            return self._writer.json(schema, lenient=self._lenient, definitions=self._root)
        if kind == "object":
            return f"({self._object(schema)})"
        if kind == "array":
            return self._tuple(schema) if schema.get("prefixItems") else self._list(schema)
        return self._anything("value")

    def _tuple(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a list with a schema for each of its first items."""
        first, (least, most) = schema["prefixItems"], self._lengths(schema)
        if most is not None and most < len(first):
            first = first[:most]
        rest = schema.get("items", True)
        ends = is_nothing(rest) or most == len(first)
        if not ends and (least > len(first) or most is not None):
            return self._unsupported("minItems or maxItems beside prefixItems and items")
        items = '""' if ends else f'("," {self._value(rest)})*'
        for number in range(len(first) - 1, -1, -1):
            comma = '"," ' if number else ""
            items = f"{comma}{self._value(first[number])} {items}"
            items = self._writer.rule(items if number < least else f'{items} | ""')
        return f'("[" {items} "]")'

    def _lengths(self, schema: Mapping[str, Any]) -> tuple[int, int | None]:
        """Return the bounds for the number of items."""
        least, most = schema.get("minItems"), schema.get("maxItems")
        least = least if isinstance(least, int) and 0 < least <= _MAX_ITEMS else 0
        return least, most if isinstance(most, int) and least <= most <= _MAX_ITEMS else None

    def _list(self, schema: Mapping[str, Any]) -> str:
        least, most = self._lengths(schema)
        if most == 0 or is_nothing(schema.get("items", True)):
            return '"[]"'
        item = self._value(schema.get("items", True))
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
