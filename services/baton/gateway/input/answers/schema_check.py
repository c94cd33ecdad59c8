"""Checks the references of JSON schemas that clients send. llguidance checks the rest."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from baton.core.errors import Reason
from baton.core.request_limits import MAX_JSON_DEPTH, printable
from baton.gateway.input.client_call import InvalidField

_VALUES = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose value is any JSON, not a schema."""
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose value has a schema for each name."""
MAX_REFERENCES = 1024
"""References of one schema."""
_MAX_PLACE_CHARACTERS = 80


def check_schema(place: str, schema: Mapping[str, Any]) -> None:
    """Check depth and references of a schema. Raises InvalidField, which says at which JSON pointer."""
    for number, (path, reference) in enumerate(_references(place, schema)):
        if number >= MAX_REFERENCES:
            raise _invalid(place, "", f"the schema has more than {MAX_REFERENCES:,} references; use fewer")
        if not isinstance(reference, str):
            raise _invalid(place, path, f"$ref is {printable(reference)}; must be a string")
        if reference != "#" and not reference.startswith("#/"):
            message = f"$ref is {printable(reference)}; must begin with '#/', because other documents are not fetched"
            raise _invalid(place, path, message)
        if not _exists(schema, reference):
            raise _invalid(place, path, f"$ref is {printable(reference)}, which the schema does not have")


def _references(place: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the JSON pointer and value of each reference."""
    stack: list[tuple[str, Any, int, bool]] = [("", schema, 0, False)]
    while stack:
        path, value, depth, is_named = stack.pop()
        if depth > MAX_JSON_DEPTH:
            raise _invalid(place, path, f"the schema is nested more than {MAX_JSON_DEPTH} levels deep; flatten it")
        if isinstance(value, list):
            stack += [(_below(path, str(n)), item, depth + 1, False) for n, item in enumerate(value)]
        if not isinstance(value, dict):
            continue
        if "$ref" in value and not is_named:
            yield path, value["$ref"]
        stack += [
            (_below(path, name), item, depth + 1, not is_named and name in _NAMED)
            for name, item in value.items()
            if isinstance(item, dict | list) and (is_named or name not in _VALUES)
        ]


def _below(path: str, name: str) -> str:
    """Return the pointer of an item. A long one stays as it is, so that its size is bounded."""
    return path if len(path) > _MAX_PLACE_CHARACTERS else f"{path}/{name[:_MAX_PLACE_CHARACTERS]}"


def _exists(schema: Any, reference: str) -> bool:
    found = schema
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isascii() and name.isdecimal() and int(name[:9]) < len(found):
            found = found[int(name)]
        else:
            return False
    return isinstance(found, dict | bool)


def _invalid(place: str, path: str, message: str) -> InvalidField:
    where = f"{place} at {printable(path)[1:-1]}" if path else place
    return InvalidField(place, f"{where}: {message}", Reason.INVALID_GRAMMAR)
