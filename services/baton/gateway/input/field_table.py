"""Rules for the fields of a JSON object that clients send: read, accepted without effect, or refused by name.

Validation, the HTTP reference page and `/openapi.json` all use these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

STRING: Mapping[str, Any] = {"type": "string"}
STRINGS: Mapping[str, Any] = {"type": "array", "items": STRING}
BOOLEAN: Mapping[str, Any] = {"type": "boolean"}
OBJECT: Mapping[str, Any] = {"type": "object"}
OBJECTS: Mapping[str, Any] = {"type": "array", "items": OBJECT}
"""JSON schemas of simple values."""


@dataclass(frozen=True, slots=True)
class ReadField:
    """A field that is read.

    text: description, a sentence.
    schema: JSON schema of the value, if the entry in `LIMITS` does not describe it. Beside `table`, the
        schema of another value that is accepted, too.
    table: rules for the fields of the object that is the value, or of each object in a list with `is_list`.
    """

    text: str
    schema: Mapping[str, Any] | None = None
    table: "FieldTable | None" = None
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class LabelField:
    """A field that is checked, and then has no effect.

    limit: entry of `LIMITS` for its value. If that has `max_items`, the value is an object of such values.
    """

    text: str
    limit: str = "label"


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A known field that is not implemented, or that clients may not set.

    advice: what a client can do instead; part of the error message.
    defaults: values that have no effect and are therefore accepted. Null is always accepted.
    """

    advice: str
    defaults: tuple[object, ...] = ()


FieldRule: TypeAlias = "ReadField | LabelField | RefusedField"
FieldTable: TypeAlias = Mapping[str, FieldRule]
