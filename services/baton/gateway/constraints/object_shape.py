"""Reads the rules for the members of an object from a JSON schema."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.gateway.output.values.schema_alternatives import alternatives

KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
"""A key that the schema does not name, as a terminal."""
MAX_LENGTH = 1000
"""Largest bound of a string's length that is enforced in text without quotes. A larger one is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectShape:
    """Members of an object.

    properties: schemas of the members, by name; also of those that are only required.
    others: schema of further members; None if there are none.
    """

    properties: Mapping[str, Any]
    required: frozenset[str]
    others: Any


def object_shape(schema: Mapping[str, Any], root: Mapping[str, Any]) -> ObjectShape:
    """Return the members that a schema allows. References within `root` are followed.

    A union of several objects allows any members.
    """
    found = alternatives(schema, root)
    rules = found[0] if len(found) == 1 else {}
    properties, required = rules.get("properties"), rules.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    extra = rules.get("additionalProperties", True)
    others = None if extra is False else (extra if isinstance(extra, Mapping) else {})
    known = dict(properties) if isinstance(properties, Mapping) else {}
    return ObjectShape(
        properties=known | {name: others or {} for name in names if name not in known},
        required=frozenset(names),
        others=others,
    )


def string_rules(schema: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the bounds for the characters of a string."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    least = least if isinstance(least, int) and 0 <= least <= MAX_LENGTH else 0
    return least, most if isinstance(most, int) and least <= most <= MAX_LENGTH else None
