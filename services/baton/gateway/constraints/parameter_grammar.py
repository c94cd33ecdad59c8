"""Writes grammars of arguments between delimiters, in which strings have no quotes."""

import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from baton.gateway.constraints.argument_values import NUMBERS, ArgumentValues, argument_values, written_number
from baton.gateway.constraints.lark_writer import LarkWriter, any_of, escaped
from baton.gateway.constraints.object_members import further_key, further_members, has_others, members
from baton.gateway.constraints.object_shape import ObjectShape, ShapeReader
from baton.gateway.constraints.string_rules import NO_RULES, StringRules
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema
from baton.gateway.output.calls.parameter_calls import MAX_KEY
from baton.gateway.output.formats import ParameterSyntax
from baton.gateway.output.values.json_escape import quote
from baton.gateway.output.values.schema_alternatives import constants, followed, parts_of
from baton.gateway.output.values.schema_document import SchemaDocument
from baton.gateway.output.values.typed_values import ToolTypes, is_text, to_json

_SPACE = r"[\s\x1c-\x1f]*"
"""White space that the parser strips. Rust's \\s lacks four of its characters."""
_NUMBER = r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9_]+)?"
_CONVERTED = {
    "null": rf"{_SPACE}(?:null|None){_SPACE}",
    "boolean": rf"{_SPACE}(?i:true|false|1|0){_SPACE}",
    "integer": f"{_SPACE}{_NUMBER}{_SPACE}",
    "number": f"{_SPACE}{_NUMBER}{_SPACE}",
    "object": rf"{_SPACE}\{{(?s:.*)",
    "array": rf"{_SPACE}\[(?s:.*)",
}
"""Texts that the parser may convert to a value of a type, and some more."""
_CONTAINERS = frozenset(("object", "array"))
_UNWRITABLE_KEY = frozenset('<>"\n')


class ParameterGrammar:
    """Grammar of the parameters of one tool, in the order of its schema.

    The parser tells the type of a value from its text. A text that it converts is therefore not allowed as a
    string where the converted value could be invalid.
    """

    def __init__(
        self,
        writer: LarkWriter,
        reader: ShapeReader,
        syntax: ParameterSyntax,
        root: Mapping[str, Any],
        *,
        types: ToolTypes,
        tool: str,
        lenient: bool,
    ) -> None:
        """Create the grammar.

        types: the types that the parser tries for each parameter.
        tool: its name.
        """
        self._writer = writer
        self._syntax = syntax
        self._root = root
        self._document = SchemaDocument(root)
        self._lenient = lenient
        self._reader = reader
        self._types = types
        self._known: dict[tuple[int, tuple[str, ...]], tuple[Any, ArgumentValues]] = {}
        self._tool = tool
        self._place = f"the tool {tool!r}"
        self._end = writer.text(syntax.after_value)
        self._closing = [] if writer.has_token(syntax.after_value) else [closing_text(syntax)]

    def expression(self) -> str:
        """Return an expression for all parameters. A schema without properties allows any.

        Raises UnsupportedSchema if the schema cannot be enforced, and the tool is strict.
        """
        shapes = self._reader.shapes(self._root, self._document, lenient=self._lenient)
        names = frozenset(name for shape in shapes for name in shape.properties) if len(shapes) > 1 else frozenset()
        found = dict.fromkeys(self._members(replace(shape, excluded=shape.excluded | names)) for shape in shapes)
        return f"({' | '.join(found)})" if len(found) > 1 else next(iter(found))

    def _members(self, shape: ObjectShape) -> str:
        names = [name for name in shape.properties if _is_writable(name)]
        if not self._lenient and (missing := sorted(shape.required.difference(names))):
            message = f"this model's calls cannot write the property {missing[0][:40]!a}, which is required; rename it"
            raise UnsupportedSchema(message)
        further = ""
        if has_others(shape, len(names)):
            cases = [
                self._parameter(further_key(self._writer, shape, pattern), schema, None)
                for pattern, schema in further_members(shape)
            ]
            further = any_of(cases)
        return members(self._writer, shape, names, lambda name: self._member(shape, name), further)

    def _member(self, shape: ObjectShape, name: str) -> str:
        """Return an expression for a parameter that is named; empty if no value matches."""
        return self._writer.counted(self._parameter(json.dumps(name), shape.properties[name], name))

    def _parameter(self, key: str, schema: Any, name: str | None) -> str:
        """Return an expression for a parameter; empty if no value matches."""
        writer, syntax = self._writer, self._syntax
        begin = f"{writer.text(syntax.before_key)} {key}"
        place = f"the parameters of {self._place}" if name is None else f"the parameter {name[:40]!a} of {self._place}"
        tried = () if syntax.after_string_key else self._tried(name)
        values = self._values(schema, tried)
        if not syntax.after_string_key:
            value = self._untyped(values, tried, place)
            return f"{begin} {writer.text(syntax.after_key)} {value}" if value else ""
        texts = [self._text(rules, place) for rules in values.strings]
        literals = self._literals(values)
        if texts and literals:  # as a pattern, because a string might go on with the delimiter
            texts.append(self._patterns(map(escaped, literals), place))
        else:
            texts += [f"{json.dumps(literal)} {self._end}" for literal in literals]
        others = [f"{self._json(other, place)} {self._end}" for other in values.others]
        branches = [f"{writer.text(syntax.after_string_key)} {any_of(texts)}"] if texts else []
        branches += [f"{writer.text(syntax.after_key)} {any_of(others)}"] if others else []
        return f"{begin} {any_of(branches)}" if branches else ""

    def _tried(self, name: str | None) -> tuple[str, ...]:
        """Return the types that the parser tries for a parameter; None for those that are not named."""
        if self._reader.is_exhausted:
            return ()
        before = self._types.num_steps
        tried = self._types.of(self._tool, name)
        self._reader.spend_alternatives(self._types.num_steps - before)
        return tried

    def _values(self, schema: Any, tried: tuple[str, ...]) -> ArgumentValues:
        schema = followed(schema, self._document)
        known = self._known.get((id(schema), tried))
        if known is None:
            untyped_json = bool(self._syntax.after_string_key) or self._syntax.untyped_json
            values = argument_values(
                schema, self._document, self._reader, tried, untyped_json=untyped_json, lenient=self._lenient
            )
            known = self._known[id(schema), tried] = (schema, values)
        return known[1]

    def _literals(self, values: ArgumentValues) -> list[str]:
        closing = self._syntax.after_value.strip()
        return [literal for literal in values.literals if closing not in literal]

    def _untyped(self, values: ArgumentValues, tried: tuple[str, ...], place: str) -> str:
        """Return an expression for a value whose text tells its type, and for the delimiter after it."""
        untyped_json = self._syntax.untyped_json
        free = values.free_kinds - _CONTAINERS if self._closing else values.free_kinds  # see `_excluded`
        if is_text(tried, untyped_json=untyped_json):
            literals, others = self._literals(values), []
        else:
            literals = [
                literal
                for literal in self._literals(values)
                if to_json(literal, tried, untyped_json=untyped_json) == quote(literal)
                and not (self._closing and literal.strip()[:1] in ("{", "[") and _has_containers(tried))
            ]
            covered = free if NO_RULES in values.strings else ()
            others = [each for each in values.others if _is_converted(each["type"], tried)]
            others = [each for each in others if each["type"] not in covered]
        if not values.strings:
            branches = [json.dumps(literal) for literal in literals] + [self._json(each, place) for each in others]
            return f"{any_of(branches)} {self._end}" if branches else ""
        excluded = () if is_text(tried, untyped_json=untyped_json) else self._excluded(free, tried)
        texts = [self._text(rules, place, *excluded) for rules in values.strings]
        fixed = [escaped(literal) for literal in literals]
        fixed += [pattern for each in others if (pattern := values.pattern_of(each, lenient=self._lenient))]
        if fixed:
            texts.append(self._patterns(fixed, place))
        texts += [f"{self._json(each, place)} {self._end}" for each in others if each["type"] in _CONTAINERS]
        return any_of(texts)

    def _excluded(self, free: Set[str], tried: tuple[str, ...]) -> list[str]:
        """Return patterns of the texts that the parser converts to values that may be invalid.

        The parser follows the strings of an object or list, if the closing delimiter is no special token. So
        no other text begins like them.
        """
        kinds = {kind for kind in tried or _CONVERTED if kind in _CONVERTED}
        kinds -= free | ({"integer"} if "number" in free else set())
        if self._closing and _has_containers(tried):
            kinds |= _CONTAINERS
        return sorted({_CONVERTED[kind] for kind in kinds})

    def _text(self, rules: StringRules, place: str = "", *excluded: str) -> str:
        """Return an expression for a string without quotes, and for the delimiter after it."""
        ruled = place if rules != NO_RULES else ""
        return self._writer.text_until(self._syntax.after_value, rules, (*self._closing, *excluded), ruled)

    def _patterns(self, patterns: Iterable[str], place: str) -> str:
        """Return an expression for a text that matches one of some patterns, and for its delimiter."""
        return self._text(StringRules(patterns=("|".join(patterns),)), place)

    def _json(self, schema: Mapping[str, Any], place: str) -> str:
        if schema["type"] in NUMBERS and constants(schema) is None:
            number = written_number(self._writer, schema, schema["type"], lenient=self._lenient, place=place)
            is_multiple = any("multipleOf" in part for part in parts_of(schema))
            # llguidance fails where a special token follows the 0 of a multipleOf; the parser strips the space
            return f"({number} / ?/)" if is_multiple and not self._closing else number
        return self._writer.json(
            schema, lenient=self._lenient, coerce=self._lenient, definitions=self._root, place=place
        )


def closing_text(syntax: ParameterSyntax) -> str:
    """Return a pattern of the texts in which the parser could find the end of a value."""
    return rf"(?s:.*){escaped(syntax.after_value.strip())}[ \t\r\n]*<(?s:.*)"


def _has_containers(tried: tuple[str, ...]) -> bool:
    return not tried or not _CONTAINERS.isdisjoint(tried)


def _is_converted(kind: str, tried: tuple[str, ...]) -> bool:
    return not tried or kind in tried or (kind == "integer" and "number" in tried)


def _is_writable(name: str) -> bool:
    return name == name.strip() and 0 < len(name) <= MAX_KEY and _UNWRITABLE_KEY.isdisjoint(name)
