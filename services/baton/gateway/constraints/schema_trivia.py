"""Tells whether a JSON schema allows nothing, or everything."""

from collections.abc import Mapping
from typing import Any

from baton.gateway.output.values.schema_alternatives import ANNOTATIONS


def is_nothing(schema: Any) -> bool:
    """True if a schema obviously matches no value."""
    return schema is False or (isinstance(schema, Mapping) and schema.get("allOf") == [False])


def has_rules(schema: Mapping[str, Any]) -> bool:
    """True if a schema has more than annotations."""
    return not schema.keys() <= ANNOTATIONS
