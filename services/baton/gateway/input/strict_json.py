"""Parses request bodies as strict JSON: UTF-8, unique keys, finite numbers and a bounded nesting depth."""

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from baton.core.errors import invalid
from baton.core.request_limits import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_VALUES, printable
from baton.gateway.input import json_pieces
from baton.gateway.input.json_pieces import PIECE_CHARS
from baton.runtime.process import loop_time

_NO_BRACKET = re.compile(r'(?:[^"\[{\]}]++|"(?:[^"\\]++|\\.)*+")*', re.DOTALL)
"""Matches complete strings, and characters outside of strings, up to a bracket.

The outer group is not possessive, as in `json_pieces`.
"""
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*', re.DOTALL)
"""Matches characters and complete escapes of a string, up to its closing quote."""


THE_BODY = "the body"
CONTAINER_BYTES = 32
"""Bytes that an object or list counts as, if they are more. It takes up to 3.5 µs if nested deeply."""


def parse_object(body: bytes | bytearray, what: str = THE_BODY) -> dict[str, Any]:
    """Parse a body that must be a JSON object. Raises Refused (400) with the problem of `what`.

    Strings may contain lone surrogates and NUL. They are rejected when a field is read, for gRPC as well.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"{what} is not valid UTF-8 at byte {error.start}; send UTF-8") from error
    _check_depth(text, what)
    try:
        value = json_pieces.loads(
            text,
            object_pairs_hook=partial(_without_duplicates, what),
            parse_constant=partial(_no_constant, what),
            max_values=MAX_JSON_VALUES,
        )
    except json_pieces.TooManyValues as error:
        raise invalid(f"{what} has more than {MAX_JSON_VALUES} strings and numbers; send several requests") from error
    except json.JSONDecodeError as error:
        raise invalid(f"{what} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:  # Python rejects integers of thousands of digits
        raise invalid(f"{what} contains a number with too many digits") from error
    if not isinstance(value, dict):
        raise invalid(f"{what} is {printable(value)}; must be a JSON object")
    return value


async def parse_body(body: bytes | bytearray, what: str = THE_BODY) -> dict[str, Any]:
    """Parse a body as `parse_object` does: in a thread if it is large, or has many objects and lists."""
    size = len(body)
    if size <= loop_time.JSON_BYTES:
        size = max(size, CONTAINER_BYTES * (body.count(b"[") + body.count(b"{")))
    return await loop_time.call(size, loop_time.JSON_BYTES, lambda: parse_object(body, what))


def _check_depth(text: str, what: str) -> None:
    """Raise Refused if the body is nested too deeply. Called before parsing, so that depth cannot exhaust the
    stack.

    Most bodies have so few brackets that counting them is enough. Each object and list takes many times its
    size in memory, so their number is bounded, too.
    """
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    depth = num_containers = 0
    for bracket in _brackets(text):
        if bracket in "[{":
            depth += 1
            num_containers += 1
            if depth > MAX_JSON_DEPTH:
                raise invalid(f"{what} is nested too deeply; at most {MAX_JSON_DEPTH} levels are allowed")
            if num_containers > MAX_JSON_CONTAINERS:
                raise invalid(f"{what} has more than {MAX_JSON_CONTAINERS} objects and lists; send several requests")
        else:
            depth -= 1


def _brackets(text: str) -> Iterator[str]:
    """Yield the brackets outside of strings. Each call of an expression gets a piece of the text."""
    at, length = 0, len(text)
    while at < length:
        match = _NO_BRACKET.match(text, at, at + PIECE_CHARS)
        assert match is not None
        at = match.end()
        char = text[at : at + 1]
        if char == '"':
            at = _string_end(text, at + 1)
        elif char and char in "[{]}":
            yield char
            at += 1


def _string_end(text: str, at: int) -> int:
    """Return the position after a string that is longer than the rest of a piece; the end of the text if it
    has no quote."""
    while True:
        match = _IN_STRING.match(text, at, at + PIECE_CHARS)
        assert match is not None
        at = match.end()
        if text[at : at + 1] == '"':
            return at + 1
        if at + 1 >= len(text):
            return len(text)  # no quote, or only half of an escape


def _without_duplicates(what: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise invalid(f"{what} has the key {printable(key)} twice; keys must be unique")
            seen.add(key)
    return value


def _no_constant(what: str, name: str) -> NoReturn:
    raise invalid(f"{what} contains {name}, which is not valid JSON; numbers must be finite")
