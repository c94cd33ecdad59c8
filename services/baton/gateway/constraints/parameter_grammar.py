"""Writes grammars of arguments between delimiters, in which strings have no quotes."""

import json
from collections.abc import Mapping
from typing import Any

from baton.gateway.constraints.lark_writer import LarkWriter
from baton.gateway.constraints.object_shape import KEY, object_shape, string_rules
from baton.gateway.output.formats import ParameterSyntax
from baton.gateway.output.values.json_escape import quote
from baton.gateway.output.values.schema_alternatives import alternatives, constants, types_of
from baton.gateway.output.values.typed_values import schema_types, to_json

_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "deprecated", "$comment"))
_CONVERTED = {
    "null": r"\s*(?:null|None)\s*",
    "boolean": r"\s*(?i:true|false|1|0)\s*",
    "integer": r"\s*[-+.0-9_eE]*[0-9][-+.0-9_eE]*\s*",
    "number": r"\s*[-+.0-9_eE]*[0-9][-+.0-9_eE]*\s*",
    "object": r"\s*[{\[](?s:.*)",
    "array": r"\s*[{\[](?s:.*)",
}
"""Texts that the parser may convert to a value of a type, and some more."""
_CONTAINERS = frozenset(("object", "array"))


class ParameterGrammar:
    """Grammar of the parameters of one tool, in the order of its schema.

    The parser tells the type of a value from its text, so a string that it would convert is not allowed where
    the converted value would be invalid.
    """

    def __init__(self, writer: LarkWriter, syntax: ParameterSyntax, root: Mapping[str, Any], *, lenient: bool) -> None:
        self._writer = writer
        self._syntax = syntax
        self._root = root
        self._lenient = lenient
        self._end = writer.text(syntax.after_value)

    def expression(self) -> str:
        """Return an expression for all parameters. A schema without properties allows any."""
        shape = object_shape(self._root, self._root)
        if not shape.properties:
            return '""' if shape.others is None else f"({self._parameter(KEY, shape.others)})*"
        parts: list[str] = []
        for name, schema in shape.properties.items():
            one = self._writer.counted(f"({self._parameter(json.dumps(name), schema)})")
            parts.append(one if name in shape.required else f"{one}?")
        return " ".join(parts)

    def _parameter(self, key: str, schema: Any) -> str:
        writer, syntax = self._writer, self._syntax
        begin = f"{writer.text(syntax.before_key)} {key}"
        strings, literals, others = self._sorted(schema)
        if not syntax.after_string_key:
            return f"{begin} {writer.text(syntax.after_key)} {self._untyped(schema, strings, literals, others)}"
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
                strings.append(each)
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
    ) -> str:
        """Return an expression for a value whose text tells its type, and for the delimiter after it."""
        if strings:
            ruled = [each for each in others if not each.keys() <= _ANNOTATIONS]
            kinds = {kind for each in ruled for kind in types_of(each, self._root)}
            excluded = sorted({_CONVERTED[kind] for kind in kinds if kind in _CONVERTED})
            values = [each for each in ruled if _CONTAINERS.issuperset(types_of(each, self._root))]
            texts = [self._text(each, *excluded) for each in strings]
            return f"({' | '.join([*texts, *(f'{self._json(each)} {self._end}' for each in values)])})"
        types = schema_types(schema, self._root)
        written = [json.dumps(literal) for literal in literals if to_json(literal, types) == quote(literal)]
        branches = written + [self._json(each) for each in others]
        return f"({' | '.join(branches)}) {self._end}" if branches else self._text({})

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
