"""JSON as the standard has it: one value a key, finite numbers, UTF-8, and no deeper than a request needs to
be."""

import json
import re
from typing import Any, NoReturn

from baton.core.errors import invalid
from baton.core.request_limits import MAX_JSON_DEPTH, printable

_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([\[{])|([\]}])', re.DOTALL)
"""A string, or a bracket outside of one. A string without its end matches, too: otherwise each quote in it
would be tried as a beginning, and every try would read to the end of the text."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is. Raises Refused (400) saying what is wrong with it.

    A lone surrogate or a NUL may stand in its strings: who reads a field checks them, as gRPC's strings are
    checked, too.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {error.start} cannot be decoded") from error
    _check_depth(text)
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise invalid(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise invalid("the body has a number that is too long") from error
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, not {printable(value)}")
    return value


def _check_depth(text: str) -> None:
    """Before parsing, so that depth costs no stack. Most bodies have so few brackets that counting them is
    enough."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for match in _BRACKETS.finditer(text):
        opens, closes = match.groups()
        if opens:
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise invalid(f"the body is nested deeper than {MAX_JSON_DEPTH} levels")
        elif closes:
            depth -= 1


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise invalid(f"the body has the key {printable(key)} twice")
            seen.add(key)
    return value


def _no_constant(name: str) -> NoReturn:
    raise invalid(f"the body has {name}, which is not JSON")
