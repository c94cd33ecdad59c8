"""Reads values of one type from decoded bodies. Errors name the value, the rule and the place."""

from collections.abc import Iterator, Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import as_object, check, check_count, check_fields, check_text
from baton.gateway.input.field_table import FieldTable
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS


def text_of(place: str, value: object, rule: str = "must be a string") -> str:
    """Return a string. Raises InvalidField with `rule` for other values."""
    if not isinstance(value, str):
        raise InvalidField(place, f"{place} {_given(value)}; {rule}")
    check_text(place, value)
    return value


def call_text_of(place: str, value: object, limit: str) -> str:
    """Return the id or the name of a call. `limit` is the entry of `LIMITS` for it. Raises InvalidField.

    Calls get other places in the chat, so they are checked while the client's place is known.
    """
    text = text_of(place, value)
    check(limit, text, place)
    return text


def flag_of(place: str, value: object) -> bool:
    """Return a boolean; null counts as false. Raises InvalidField."""
    if value is not None and not isinstance(value, bool):
        raise InvalidField(place, f"{place} is {printable(value)}; must be true or false")
    return bool(value)


def objects_of(place: str, value: object, limit: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each object of a list with its place. `limit` is the entry of `LIMITS` for the number of items.

    Raises InvalidField.
    """
    if not isinstance(value, JSON_LISTS):
        raise InvalidField(place, f"{place} {_given(value)}; must be a list of objects")
    check_count(limit, len(value), place)
    for index, item in enumerate(value):
        yield f"{place}[{index}]", as_object(f"{place}[{index}]", item)


def object_of(place: str, value: object, table: FieldTable, unknown: UnknownFields) -> Mapping[str, Any]:
    """Return an object with the fields of `table`; an empty one for null. Raises InvalidField."""
    if value is None:
        return {}
    fields = as_object(place, value)
    check_fields(fields, table, unknown, f"{place}.")
    return fields


def unsupported(place: str, value: object, advice: str) -> InvalidField:
    """Return the error for a kind of object that is not implemented."""
    message = f"{place} {_given(value)}; {advice}"
    return InvalidField(place, message, Reason.UNSUPPORTED_FIELD)


def _given(value: object) -> str:
    return "is missing" if value is None else f"is {printable(value)}"
