"""Writes grammars of arguments between delimiters, in which strings have no quotes."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from baton.gateway.constraints.lark_writer import LarkWriter
from baton.gateway.constraints.object_shape import (
    KEY,
    ObjectShape,
    ShapeReader,
    UnsupportedSchema,
    string_rules,
)
from baton.gateway.constraints.schema_conjunction import joined
from baton.gateway.output.formats import ParameterSyntax
from baton.gateway.output.values.json_escape import quote
from baton.gateway.output.values.schema_alternatives import alternatives, constants, types_of
from baton.gateway.output.values.typed_values import schema_types, to_json

_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "deprecated", "$comment"))
_SPACE = r"[\s\x1c-\x1f]*"
"""White space that the parser strips. Rust's \\s lacks four of its characters."""
_CONVERTED = {
    "null": rf"{_SPACE}(?:null|None){_SPACE}",
    "boolean": rf"{_SPACE}(?i:true|false|1|0){_SPACE}",
    "integer": rf"{_SPACE}[-+.0-9_eE]*[0-9][-+.0-9_eE]*{_SPACE}",
    "number": rf"{_SPACE}[-+.0-9_eE]*[0-9][-+.0-9_eE]*{_SPACE}",
    "object": rf"{_SPACE}[{{\[](?s:.*)",
    "array": rf"{_SPACE}[{{\[](?s:.*)",
}
"""Texts that the parser may convert to a value of a type, and some more."""
_CONTAINERS = frozenset(("object", "array"))


class ParameterGrammar:
    """Grammar of the parameters of one tool, in the order of its schema.

    The parser tells the type of a value from its text, so a string that it would convert is not allowed where
    the converted value would be invalid.
    """

    def __init__(
        self,
        writer: LarkWriter,
        reader: ShapeReader,
        syntax: ParameterSyntax,
        root: Mapping[str, Any],
        *,
        lenient: bool,
    ) -> None:
        self._writer = writer
        self._syntax = syntax
        self._root = root
        self._lenient = lenient
        self._reader = reader
        self._end = writer.text(syntax.after_value)
        self._kinds: dict[str, set[str]] = {}

    def expression(self) -> str:
        """Return an expression for all parameters. A schema without properties allows any.

        Raises UnsupportedSchema if the schema cannot be enforced, and the tool is strict.
        """
        shapes = self._reader.shapes(self._root, self._root, lenient=self._lenient)
        if len(shapes) > 1:
            for shape in shapes:
                for name, schema in shape.properties.items():
                    self._kinds.setdefault(name, set()).update(schema_types(schema, self._root))
        found = dict.fromkeys(self._members(shape) for shape in shapes)
        return f"({' | '.join(found)})" if len(found) > 1 else next(iter(found))

    def _members(self, shape: ObjectShape) -> str:
        if not shape.properties:
            return '""' if shape.others is None else f"({self._parameter(KEY, shape.others)})*"
        parts: list[str] = []
        for name, schema in shape.properties.items():
            kinds = self._kinds.get(name, set()).difference(schema_types(schema, self._root))
            one = self._writer.counted(f"({self._parameter(json.dumps(name), schema, kinds)})")
            parts.append(one if name in shape.required else f"{one}?")
        return " ".join(parts)

    def _parameter(self, key: str, schema: Any, other_kinds: Collection[str] = ()) -> str:
        """Return an expression for a parameter.

        other_kinds: types that the parser tries, because a parameter of the name has them in other objects.
        """
        writer, syntax = self._writer, self._syntax
        begin = f"{writer.text(syntax.before_key)} {key}"
        strings, literals, others = self._sorted(schema)
        if not syntax.after_string_key:
            value = self._untyped(schema, strings, literals, others, other_kinds)
            return f"{begin} {writer.text(syntax.after_key)} {value}"
        texts = [*map(self._text, strings), *(f"{json.dumps(literal)} {self._end}" for literal in literals)]
        values = [f"{self._json(other)} {self._end}" for other in others]
        branches = [f"{writer.text(syntax.after_string_key)} ({' | '.join(texts)})"] if texts else []
        branches += [f"{writer.text(syntax.after_key)} ({' | '.join(values)})"] if values else []
        return f"{begin} ({' | '.join(branches)})"

    def _sorted(self, schema: Any) -> tuple[list[Mapping[str, Any]], list[str], list[Mapping[str, Any]]]:
        """Return the schemas of free strings, the strings that are listed, and the other schemas."""
        strings: list[Mapping[str, Any]] = []
        others: list[Mapping[str, Any]] = []
        listed: list[Any] = []
        for each in alternatives(schema, self._root):
            kinds = types_of(each, self._root)
            values = constants(each)
            if values is not None:
                listed += values
            elif not kinds or "string" in kinds:
                strings.append(self._joined(each))
            else:
                others.append(each)
        literals = [value for value in listed if isinstance(value, str)]
        if rest := [value for value in listed if not isinstance(value, str)]:
            others.append({"enum": rest})
        return strings if strings or literals or others else [{}], literals, others

    def _untyped(
        self,
        schema: Any,
        strings: list[Mapping[str, Any]],
        literals: list[str],
        others: list[Mapping[str, Any]],
        other_kinds: Collection[str],
    ) -> str:
        """Return an expression for a value whose text tells its type, and for the delimiter after it."""
        if strings:
            ruled = [each for each in others if not each.keys() <= _ANNOTATIONS]
            kinds = {kind for each in ruled for kind in types_of(each, self._root)}.union(other_kinds)
            excluded = sorted({_CONVERTED[kind] for kind in kinds if kind in _CONVERTED})
            values = [each for each in ruled if _CONTAINERS.issuperset(types_of(each, self._root))]
            texts = [self._text(each, *excluded) for each in strings]
            return f"({' | '.join([*texts, *(f'{self._json(each)} {self._end}' for each in values)])})"
        types = schema_types(schema, self._root)
        written = [json.dumps(literal) for literal in literals if to_json(literal, types) == quote(literal)]
        branches = written + [self._json(each) for each in others]
        return f"({' | '.join(branches)}) {self._end}" if branches else self._text({})

    def _joined(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        found = joined(schema, self._root) if "allOf" in schema else schema
        if found is None and not self._lenient:
            raise UnsupportedSchema("this model's calls cannot enforce an allOf of a string; write it as one schema")
        return schema if found is None else found

    def _text(self, schema: Mapping[str, Any], *excluded: str) -> str:
        """Return an expression for a string without quotes, and for the delimiter after it."""
        return self._writer.text_until(
            self._syntax.after_value,
            *string_rules(schema),
            self._writer.pattern(schema, lenient=self._lenient),
            excluded,
        )

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._writer.json(schema, lenient=self._lenient, definitions=self._root)
