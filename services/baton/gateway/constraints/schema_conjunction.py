"""Joins JSON schemas that all apply to one value into one schema without `allOf`."""

from collections.abc import Callable, Mapping
from typing import Any

from baton.gateway.output.values.schema_alternatives import resolve_reference, rest_of

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "$defs", "definitions")
)
"""Keywords that allow every value."""
_MAX_SCHEMAS = 64
"""Largest number of schemas that are joined."""
_MOST: Callable[..., Any] = max
_LEAST: Callable[..., Any] = min
_JOINED: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("minLength", "minItems", "minimum", "exclusiveMinimum"), _MOST),
    **dict.fromkeys(("maxLength", "maxItems", "maximum", "exclusiveMaximum"), _LEAST),
}
"""Rules of which the narrower one remains."""


def is_nothing(schema: Any) -> bool:
    """True if a schema obviously matches no value."""
    return schema is False or (isinstance(schema, Mapping) and schema.get("allOf") == [False])


def joined(schema: Mapping[str, Any], root: Any) -> Mapping[str, Any] | None:
    """Return a schema without `allOf` that matches the same values; itself if it has none.

    References beside which there are rules are followed. None if two rules cannot be joined.
    """
    found: dict[str, Any] = {}
    waiting: list[Any] = [schema]
    num_schemas = 0
    while waiting:
        current = waiting.pop()
        num_schemas += 1
        if current is True:
            continue
        if not isinstance(current, Mapping) or num_schemas > _MAX_SCHEMAS:
            return None
        if isinstance(every := current.get("allOf"), list):
            waiting += [rest_of(current, "allOf"), *reversed(every)]
        elif isinstance(reference := current.get("$ref"), str):
            waiting += [rest_of(current, "$ref"), resolve_reference(reference, root)]
        elif not _join(found, current):
            return None
    return found


def _join(found: dict[str, Any], schema: Mapping[str, Any]) -> bool:
    """Add rules. Return False if one of them cannot be joined with those that are there."""
    for name, rule in schema.items():
        known = found.setdefault(name, rule)
        if name in ANNOTATIONS or (known == rule and type(known) is type(rule)):
            continue
        if name in _JOINED and isinstance(known, int | float) and isinstance(rule, int | float):
            found[name] = _JOINED[name](known, rule)
        elif name == "type" and {known, rule} == {"integer", "number"}:
            found[name] = "integer"
        else:
            return False
    return True
