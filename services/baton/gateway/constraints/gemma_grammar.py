"""Writes grammars of Gemma's objects: bare keys, and strings between delimiters."""

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.gateway.constraints.argument_values import (
    NUMBERS,
    ArgumentValues,
    add_constants,
    ambiguous_one_of,
    kinds_of_value,
    written_number,
)
from baton.gateway.constraints.lark_writer import LarkWriter, any_of
from baton.gateway.constraints.number_pattern import number_pattern
from baton.gateway.constraints.object_members import further_key, further_members, has_others, members
from baton.gateway.constraints.object_shape import ONE_OF, ObjectShape, ShapeReader
from baton.gateway.constraints.string_rules import string_rules
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema
from baton.gateway.output.values.schema_alternatives import (
    constants,
    has_rules,
    is_nothing,
    kinds_of,
    parts_of,
    rest_of,
)
from baton.gateway.output.values.schema_document import SchemaDocument

_KINDS = ("number", "boolean", "null", "string", "array", "object")
_COMMA = '","'
_BARE_KEY = re.compile(r'[^\s:{}\[\],"<>]{1,512}')
_MAX_ITEMS = 1000
"""Largest bound of a list's length. Larger ones are narrowed to it."""
_MAX_JOINED = 256
_MAX_JOINED_DEPTH = 24
"""Values to which several schemas apply: of one tool, and within each other. Recursive ones have no end."""


class GemmaGrammar:
    """Grammar of the arguments of one tool. Members come in the order of their names.

    Expressions of values are empty if no value matches.
    """

    def __init__(
        self,
        writer: LarkWriter,
        reader: ShapeReader,
        delimiter: str,
        root: Mapping[str, Any],
        *,
        tool: str,
        lenient: bool,
    ) -> None:
        self._writer = writer
        self._delimiter = delimiter
        self._quote = writer.text(delimiter)
        self._root = root
        self._document = SchemaDocument(root)
        self._lenient = lenient
        self._reader = reader
        self._references: dict[str, str] = {}
        self._num_joined = self._depth = 0
        self._tool = f"the tool {tool!r}"
        self._has_anything = False
        self._parameter = ""  # the argument that is being written

    def expression(self) -> str:
        """Return an expression for the arguments.

        Raises UnsupportedSchema if the schema cannot be enforced, and the tool is strict.
        """
        return self._object(self._root)

    @property
    def _place(self) -> str:
        return f"the parameter {self._parameter[:40]!a} of {self._tool}" if self._parameter else self._tool

    def _object(self, schema: Mapping[str, Any]) -> str:
        shapes = self._reader.shapes(schema, self._document, lenient=self._lenient)
        return any_of(map(self._shape, shapes))

    def _shape(self, shape: ObjectShape) -> str:
        names = sorted(shape.properties)
        if shape == ObjectShape():
            return self._anything("object")
        further = ""
        if has_others(shape, len(names)):
            cases = []
            for pattern, schema in further_members(shape):
                if value := self._value(schema):
                    cases.append(f'{further_key(self._writer, shape, pattern)} ":" {value}')
            further = any_of(cases)
        written = members(self._writer, shape, names, lambda name: self._member(shape, name), further, _COMMA)
        return f'"{{" {written} "}}"'

    def _member(self, shape: ObjectShape, name: str) -> str:
        is_argument = not self._parameter
        self._parameter = self._parameter or name
        value = self._value(shape.properties[name])
        self._parameter = "" if is_argument else self._parameter
        return self._writer.counted(f"{json.dumps(_key(name) + ':')} {value}" if value else "")

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return "" if schema is False or schema is None else self._anything("value")
        reference = schema.get("$ref")
        if isinstance(reference, str) and not has_rules(rest_of(schema, "$ref")):
            return self._reference(reference)
        for union in ("anyOf", "oneOf"):  # references in it may be recursive, so they are not resolved
            choices = schema.get(union)
            if isinstance(choices, list) and choices and not has_rules(rest_of(schema, union)):
                if union == "oneOf" and not self._lenient and ambiguous_one_of(schema, self._document) is not None:
                    raise UnsupportedSchema(ONE_OF, "oneOf", choices)
                self._reader.spend_alternatives(len(choices))
                return self._anything("value") if self._reader.is_exhausted else any_of(map(self._value, choices))
        if not {"$ref", "allOf", "anyOf", "oneOf", "nullable"}.isdisjoint(schema):
            return self._several(schema)
        kinds = schema.get("type")
        if isinstance(kinds, list) and "enum" not in schema and "const" not in schema:
            return any_of(self._typed({**schema, "type": kind}) for kind in kinds)
        return self._typed(schema)

    def _several(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a value to which several schemas apply."""
        self._num_joined += 1
        if self._num_joined > _MAX_JOINED or self._depth == _MAX_JOINED_DEPTH:
            return self._unsupported("so many allOf, and rules beside $ref and anyOf")
        self._depth += 1
        found = kinds_of_value(schema, self._document, self._reader, lenient=self._lenient)
        expression = any_of(map(self._typed, found))
        self._depth -= 1
        return expression

    def _unsupported(self, what: str) -> str:
        if not self._lenient:
            raise UnsupportedSchema(f"this model's calls cannot enforce {what}; write it as one schema")
        return self._anything("value")

    def _typed(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a value of a schema without unions."""
        if (values := constants(schema)) is not None:
            return self._constants(schema, values)
        kinds = kinds_of(schema)
        if not kinds:
            if not any(has_rules(part) for part in parts_of(schema)):
                return self._anything("value")
            return any_of(self._typed({**schema, "type": kind}) for kind in _KINDS)
        kind = kinds[0]
        if kind == "string":
            rules = string_rules(schema, lenient=self._lenient)
            return f"({self._quote} {self._writer.text_until(self._delimiter, rules, place=self._place)})"
        if kind == "object":
            return _grouped(self._object(schema))
        if kind == "array":
            return self._list(schema)
        if kind in NUMBERS:
            return written_number(self._writer, schema, kind, lenient=self._lenient, place=self._place)
        return self._writer.json(
            schema, lenient=self._lenient, coerce=self._lenient, definitions=self._root, place=self._place
        )

    def _constants(self, schema: Mapping[str, Any], values: list[Any]) -> str:
        found = ArgumentValues()
        add_constants(found, schema, values, lenient=self._lenient)
        if any("allOf" in other for other in found.others):
            return self._unsupported("rules beside the enum or const of objects and lists")
        listed = [*found.literals, *(value for other in found.others for value in other["enum"])]
        texts = [self._writer.text_until(self._delimiter, rules, place=self._place) for rules in found.strings]
        return any_of([*map(self._literal, listed), *(f"{self._quote} {text}" for text in texts)])

    def _list(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a list, which may have a schema for each of its first items."""
        parts = [part for part in parts_of(schema) if not {"items", "prefixItems"}.isdisjoint(part)]
        if len(parts) > 1 and any("prefixItems" in part for part in parts):
            return self._unsupported("several schemas with prefixItems for a list")
        first = parts[0].get("prefixItems", []) if parts else []
        rest = parts[0].get("items", True) if len(parts) == 1 else {"allOf": [part["items"] for part in parts]}
        least, most = self._lengths(schema)
        if most is not None and most < len(first):
            first = first[:most]
            rest = False
        item = "" if is_nothing(rest) or most == len(first) else self._value(rest if parts else True)
        if not item and least > len(first):
            return ""
        more = "" if most is None else most - len(first)
        if not first:
            return self._equal_items(item, least, most)
        items = f'("," {item}){{{max(least - len(first), 0)},{more}}}' if item else '""'
        for number in range(len(first) - 1, -1, -1):
            value = self._value(first[number])
            following = f"{_COMMA if number else ''} {value} {items}" if value and items else ""
            options = [each for each in (following, "" if number < least else '""') if each]
            items = self._writer.rule(" | ".join(options)) if options else ""
        return f'("[" {items} "]")' if items else ""

    def _equal_items(self, item: str, least: int, most: int | None) -> str:
        if not item:
            return '"[]"'
        if most == 0:
            return '"[]"'
        more = "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'("[" {item} {more} "]")' if least else f'("[" ({item} {more})? "]")'

    def _lengths(self, schema: Mapping[str, Any]) -> tuple[int, int | None]:
        """Return the bounds for the number of items."""
        least, most = 0, None
        for part in parts_of(schema):
            shortest, longest = part.get("minItems"), part.get("maxItems")
            if isinstance(shortest, int) and shortest > _MAX_ITEMS:
                if not self._lenient:
                    message = f"this model's calls cannot enforce a minItems above {_MAX_ITEMS:,}; lower it"
                    raise UnsupportedSchema(message, "minItems", shortest)
                shortest = _MAX_ITEMS
            least = max(least, shortest if isinstance(shortest, int) else 0)
            if isinstance(longest, int):
                most = min(_MAX_ITEMS if most is None else most, longest)
        if most is not None and most < least:
            if not self._lenient:
                raise UnsupportedSchema("no list matches; maxItems must be at least minItems", "maxItems", most)
            most = None
        return least, most

    def _reference(self, reference: str) -> str:
        """Return the rule of a reference, which may contain itself."""
        known = self._references.get(reference)
        if known is None:
            known = self._references[reference] = self._writer.reserve()
            expression = self._value(self._document.resolve(reference))
            if not expression:
                raise UnsupportedSchema("no value matches; leave out what refers to this schema", "$ref", reference)
            self._writer.fixed_rule(known, expression)
        return known

    def _literal(self, value: Any) -> str:
        """Return an expression for one value; empty if it cannot be written."""
        if isinstance(value, str):
            return "" if self._delimiter in value else f"({self._quote} {json.dumps(value)} {self._quote})"
        if isinstance(value, list):
            items = [self._literal(item) for item in value]
            return f'("[" {f" {_COMMA} ".join(items)} "]")' if all(items) else ""
        if isinstance(value, Mapping):
            written = {name: self._literal(value[name]) for name in sorted(value)}
            pairs = (f"{json.dumps(_key(name) + ':')} {text}" for name, text in written.items())
            return f'("{{" {f" {_COMMA} ".join(pairs)} "}}")' if all(written.values()) else ""
        return json.dumps(json.dumps(value))

    def _anything(self, rule: str) -> str:
        """Return an expression for any object or value."""
        if self._has_anything:
            return f"gemma_{rule}"
        self._has_anything = True
        writer = self._writer
        string = f"{self._quote} {writer.text_until(self._delimiter)}"
        number = writer.regex(number_pattern({}, integer=False))
        scalar = f'{number} | "true" | "false" | "null"'
        items = '"[" (gemma_value ("," gemma_value)*)? "]"'
        writer.fixed_rule("gemma_value", f"{string} | {scalar} | gemma_object | {items}")
        member = f'{further_key(writer, ObjectShape(), None)} ":" gemma_value'
        writer.fixed_rule("gemma_object", f'"{{" ({member} ("," {member})*)? "}}"')
        return f"gemma_{rule}"


def _key(name: str) -> str:
    """Return a key as it is written: bare, or as JSON if it has other characters."""
    return name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _grouped(expression: str) -> str:
    return f"({expression})" if expression else ""
