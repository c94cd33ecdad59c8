"""Reads request fields and checks them against the table of limits.

Errors are `InvalidField` with a message that names the field, its value, the rule and the remedy.
"""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import LIMITS, OutOfLimits, printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_table import FieldTable, LabelField, ReadField
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS


class FieldReader:
    """Reads the fields of one JSON object. A null field counts as omitted."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix

    def value(self, name: str) -> Any:
        """Return the checked value of a field, or its default if it is omitted."""
        value = self._body.get(name)
        if value is None:
            return LIMITS[self._prefix + name].default
        check(self._prefix + name, value)
        return value

    def items(self, name: str) -> tuple[Any, ...]:
        """Return the checked items of a list field; empty if it is omitted."""
        values = self._body.get(name)
        if values is None:
            return ()
        if not isinstance(values, JSON_LISTS):
            raise InvalidField(name, f"{name} is {printable(values)}; must be a list")
        check_count(name, len(values))
        for value in values:
            check(name, value)
        return tuple(values)

    def flag(self, name: str) -> bool:
        """Return a boolean field, even if the table of limits has another type under its name."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidField(name, f"{name} is {printable(value)}; must be true or false")
        return bool(value)


def check(name: str, value: object, param: str | None = None) -> None:
    """Check a value against the limit called `name`, and a string with `check_text` too.

    `param` is the field's name in errors, if it differs. Raises InvalidField.
    """
    try:
        LIMITS[name].check(param or name, value)
    except OutOfLimits as error:
        raise InvalidField(error.name, str(error)) from error
    if isinstance(value, str):
        check_text(param or name, value)


def check_count(name: str, count: int, param: str | None = None) -> None:
    """Check the number of items of a list or object field. Raises InvalidField."""
    try:
        LIMITS[name].check_count(param or name, count)
    except OutOfLimits as error:
        raise InvalidField(error.name, str(error)) from error


def check_text(name: str, text: str) -> None:
    """Raise InvalidField if a string contains a NUL character or a lone surrogate, which are not valid
    text."""
    if "\0" in text:
        raise InvalidField(name, f"{name} contains a NUL character; remove it")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidField(
                name, f"{name} contains a lone surrogate at character {error.start}; send complete characters"
            ) from error


def check_fields(body: Mapping[str, Any], table: FieldTable, unknown: UnknownFields, prefix: str = "") -> None:
    """Check that `body` has only fields that `table` allows, and report unknown ones to `unknown`.

    Allowed are fields that are read, valid labels, and refused fields with a value that has no effect.
    `prefix` is prepended to names. Raises InvalidField for the first field that is refused.
    """
    for name, value in body.items():
        rule = table.get(name)
        if isinstance(rule, ReadField):
            continue
        if rule is None:
            unknown.add(name, table, prefix)
        elif value is None:
            continue
        elif isinstance(rule, LabelField):
            _check_label(prefix + name, value, rule)
        elif not any(type(value) is type(default) and value == default for default in rule.defaults):
            full = prefix + name
            raise InvalidField(full, f"{full} is not implemented: {rule.advice}", Reason.UNSUPPORTED_FIELD)


def _check_label(name: str, value: object, rule: LabelField) -> None:
    """Check the value of a field that has no effect. Raises InvalidField."""
    if LIMITS[rule.limit].max_items is None:
        check(rule.limit, value, name)
        return
    values = as_object(name, value)
    check_count(rule.limit, len(values), name)
    for key, item in values.items():
        check(rule.limit, key, name)
        check(rule.limit, item, name)


def as_object(name: str, value: object) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object. Raises InvalidField if not."""
    if not isinstance(value, Mapping):
        raise InvalidField(name, f"{name} is {printable(value)}; must be an object")
    return value
