"""Reading a request's fields against the table of limits. Raises `InvalidField`, naming the field and what
would be right."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import LIMITS, OutOfLimits, printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_policy import LABELS, Unimplemented


class Reader:
    """Reads fields of one object against the table of limits. Null means left out. `prefix` is its own name,
    where it is nested."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix

    def value(self, name: str) -> Any:
        """The checked value, or the table's default."""
        value = self._body.get(name)
        if value is None:
            return LIMITS[self._prefix + name].default
        check(self._prefix + name, value)
        return value

    def items(self, name: str) -> tuple[Any, ...]:
        """The checked items of a list; empty when it was left out."""
        values = self._body.get(name)
        if values is None:
            return ()
        if not isinstance(values, list | tuple):
            raise InvalidField(name, f"{name} must be a list, not {printable(values)}")
        check_count(name, len(values))
        for value in values:
            check(name, value)
        return tuple(values)

    def flag(self, name: str) -> bool:
        """A field that is a boolean here, whatever the table has under its name."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidField(name, f"{name} must be true or false, not {printable(value)}")
        return bool(value)


def check(name: str, value: object, param: str | None = None) -> None:
    """`value` against the limit called `name`; text also against what no tokenizer can read."""
    try:
        LIMITS[name].check(param or name, value)
    except OutOfLimits as error:
        raise InvalidField(error.name, str(error)) from error
    if isinstance(value, str):
        check_text(param or name, value)


def check_count(name: str, count: int, param: str | None = None) -> None:
    try:
        LIMITS[name].check_count(param or name, count)
    except OutOfLimits as error:
        raise InvalidField(error.name, str(error)) from error


def check_text(name: str, text: str) -> None:
    """No NUL and no lone surrogate: neither is text."""
    if "\0" in text:
        raise InvalidField(name, f"{name} has a NUL character; remove it")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidField(
                name, f"{name} has a lone surrogate at character {error.start}; send whole characters"
            ) from error


def refuse_others(
    body: Mapping[str, Any],
    known: Collection[str],
    unimplemented: Mapping[str, Unimplemented],
    prefix: str = "",
    also: Callable[[str, object], bool] | None = None,
) -> None:
    """Refuse each field that is neither known nor a label (`also(name, value)` is true) nor asks for
    nothing."""
    for name, value in body.items():
        if name in known or (also is not None and also(name, value)):
            continue
        full = prefix + name
        field = unimplemented.get(name)
        if field is not None:
            if value is not None and not any(
                type(value) is type(default) and value == default for default in field.defaults
            ):
                raise InvalidField(full, f"{full} is not implemented: {field.advice}", Reason.UNSUPPORTED_FIELD)
            continue
        near = difflib.get_close_matches(name, [*known, *unimplemented, *LABELS], n=1) if len(name) <= 64 else []
        hint = f"; did you mean {prefix}{near[0]}?" if near else "; remove it"
        raise InvalidField(printable(full)[1:-1], f"unknown field {printable(full)}{hint}", Reason.UNSUPPORTED_FIELD)


def as_object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidField(name, f"{name} must be an object, not {printable(value)}")
    return value
