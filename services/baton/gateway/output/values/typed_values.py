"""Converts argument text that has no JSON types to JSON, by the parameter schemas of the tool."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from baton.gateway.output.formats import ToolSchemas
from baton.gateway.output.values.json_container import MAX_JSON_DEPTH, JsonContainer, JsonContainerReader
from baton.gateway.output.values.json_escape import quote, without_lone_surrogates
from baton.gateway.output.values.schema_alternatives import (
    MAX_ALTERNATIVES,
    alternatives,
    followed,
    parts_of_object,
    types_of,
)
from baton.gateway.output.values.schema_document import SchemaDocument

_MAX_NUMBER_CHARS = 400
_MAX_STEPS = 1024
"""Schemas that are looked at for the types of one parameter."""
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*"?|[\[{\]}]')
_INTEGER = re.compile(r"[+-]?[0-9]+")


class ToolTypes:
    """The JSON types that a request's tools allow for each parameter."""

    __slots__ = ("_documents", "_of_enums", "_of_rules", "_parts", "_schemas", "_types", "num_steps")

    def __init__(self, tools: ToolSchemas) -> None:
        """Create the types. `num_steps` counts schemas that were looked at."""
        self._schemas = tools
        self._documents: dict[str, SchemaDocument] = {}
        self._parts: dict[str, list[Mapping[str, Any]]] = {}
        self._of_rules: dict[int, _RuleTypes] = {}  # by the identity of a schema, which the tools keep alive
        self._of_enums: dict[int, list[str]] = {}
        self._types: dict[tuple[str, str | None], tuple[str, ...]] = {}
        self.num_steps = 0

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def __bool__(self) -> bool:
        """True if the request has tools."""
        return bool(self._schemas)

    def of(self, tool: str, parameter: str | None) -> tuple[str, ...]:
        """Return the types of a parameter in the order of the schema; empty if the schema does not tell.

        parameter: None for one that the schema does not name.
        """
        document, parts = self._document(tool)
        key = (tool, parameter if any(parameter in _properties(each) for each in parts) else None)
        if key not in self._types:
            named = [] if key[1] is None else [_properties(each).get(key[1]) for each in parts]
            kinds = self._all_types((rule for rule in named if rule is not None), document)
            others = (rule for each in parts for rule in _others(each))
            self._types[key] = kinds or self._all_types(others, document)
        return self._types[key]

    def _document(self, tool: str) -> tuple[SchemaDocument, list[Mapping[str, Any]]]:
        """Return a tool's schema, and those parts of it that have members."""
        if tool not in self._documents:
            document = self._documents[tool] = SchemaDocument(self._schemas.get(tool))
            self._parts[tool] = parts_of_object(document)
        return self._documents[tool], self._parts[tool]

    def _all_types(self, rules: Iterable[Any], document: SchemaDocument) -> tuple[str, ...]:
        """Return the types that some schemas name: the first ones, if there are too many to look at."""
        kinds: dict[str, None] = {}
        steps = 0
        for rule in rules:
            found = self._types_of(followed(rule, document), document)
            kinds.update(dict.fromkeys(found.types))
            steps += found.num_steps + 1
            if steps > _MAX_STEPS:
                break
        self.num_steps += steps
        return tuple(kinds)

    def _types_of(self, rule: Any, document: SchemaDocument) -> "_RuleTypes":
        known = self._of_rules.get(id(rule))
        if known is None:
            found = alternatives(rule, document)
            kinds = dict.fromkeys(kind for each in found.schemas for kind in types_of(each, self._of_enums))
            known = self._of_rules[id(rule)] = _RuleTypes(tuple(kinds), found.num_steps)
        return known


class _RuleTypes(NamedTuple):
    """The types that one schema names."""

    types: tuple[str, ...]
    num_steps: int


def _others(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of members that are not named."""
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping):
        yield from islice(patterns.values(), MAX_ALTERNATIVES)
    yield schema.get("additionalProperties")
    yield schema.get("unevaluatedProperties")


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def is_text(types: tuple[str, ...], *, untyped_json: bool) -> bool:
    """Return True if a value of these types is a string whatever its text, so that it can be streamed."""
    return all(name == "string" for name in types) if types else not untyped_json


def read_container(text: str) -> JsonContainer | None:
    """Return a text as a JSON object or list; None if it is none, or if it is nested too deeply.

    `JsonContainerReader` does the same for text that arrives in pieces.
    """
    if text[:1] not in ("{", "[") or not _is_shallow(text):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number beyond doubles, or NaN
        reader = JsonContainerReader()
        reader.put(text)
        return reader.finish()
    return JsonContainer(without_lone_surrogates(written), isinstance(value, dict))


def _is_shallow(text: str) -> bool:
    """Return True if objects and lists are nested at most `MAX_JSON_DEPTH` deep."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return True
    depth = deepest = 0
    for mark in _STRING_OR_BRACKET.findall(text):
        if mark in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif mark in ("]", "}"):
            depth -= 1
    return deepest <= MAX_JSON_DEPTH


def to_json(
    raw: str,
    types: tuple[str, ...],
    *,
    untyped_json: bool = False,
    as_container: Callable[[str], JsonContainer | None] = read_container,
) -> str:
    """Return the JSON of a value that was written as `raw`.

    The types are tried in order, except strings. Text that is none of them is a string: `6` is the number
    where both are allowed. `0` and `1` are booleans only where no number is allowed. With `untyped_json`,
    text without a type is JSON if it is valid JSON.

    as_container: returns the value as a JSON object or list, if it is one.
    """
    if not types and untyped_json:
        types = ("array", "object", "boolean", "null", "integer", "number")
        if raw.strip() in {"0", "1"} or raw.strip().lower() in {"true", "false", "none"}:
            return {"none": quote(raw)}.get(raw.strip().lower(), raw.strip().lower())
    text = raw.strip()
    has_numbers = "integer" in types or "number" in types
    for name in types:
        if name == "boolean" and has_numbers and text in ("0", "1"):
            continue
        converted = _convert(text, name, as_container)
        if converted is not None:
            return converted
    return quote(raw)


def _convert(text: str, type_name: str, as_container: Callable[[str], JsonContainer | None]) -> str | None:
    """Return the JSON of `text` as a value of a type; None if it is not one."""
    if type_name == "boolean":
        return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.lower())
    if type_name == "null":
        return "null" if text in ("null", "None") else None
    if type_name in ("integer", "number"):
        return _number(text, integer=type_name == "integer")
    if type_name in ("object", "array"):
        found = as_container(text)
        return found.text if found is not None and found.is_object == (type_name == "object") else None
    return None


def _number(text: str, *, integer: bool) -> str | None:
    if not text.isascii() or len(text) > _MAX_NUMBER_CHARS:
        return None
    if _INTEGER.fullmatch(text):
        return str(int(text))
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number) or (integer and not number.is_integer()):
        return None
    return json.dumps(int(number) if integer or (number.is_integer() and "." not in text) else number)
