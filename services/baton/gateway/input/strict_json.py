"""Parses request bodies as strict JSON: UTF-8, unique keys, finite numbers and a bounded nesting depth."""

import asyncio
import json
import re
from typing import Any, NoReturn

from baton.core.errors import invalid
from baton.core.request_limits import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, printable
from baton.gateway.input import json_pieces

INLINE_BODY_BYTES = 32 * 1024
"""A larger body is parsed and validated in a thread. This size takes a millisecond or two."""
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([\[{])|([\]}])', re.DOTALL)
"""Matches a string, or a bracket outside of a string. A string without a closing quote matches too. Otherwise
the search would try each later quote as a beginning and read to the end of the text every time."""


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object. Raises Refused (400) with the problem.

    Strings may contain lone surrogates and NUL. They are rejected when a field is read, for gRPC as well.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not valid UTF-8 at byte {error.start}; send UTF-8") from error
    _check_depth(text)
    try:
        value = json_pieces.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise invalid(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except ValueError as error:  # Python rejects integers of thousands of digits
        raise invalid("the body contains a number with too many digits") from error
    if not isinstance(value, dict):
        raise invalid(f"the body is {printable(value)}; must be a JSON object")
    return value


async def parse_body(body: bytes) -> dict[str, Any]:
    """Parse a body as `parse_object` does. A large one is parsed in a thread."""
    return parse_object(body) if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(parse_object, body)


def _check_depth(text: str) -> None:
    """Raise Refused if the body is nested too deeply. Called before parsing, so that depth cannot exhaust the
    stack.

    Most bodies have so few brackets that counting them is enough. Each object and list takes many times its
    size in memory, so their number is bounded, too.
    """
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    depth = num_containers = 0
    for match in _BRACKETS.finditer(text):
        opens, closes = match.groups()
        if opens:
            depth += 1
            num_containers += 1
            if depth > MAX_JSON_DEPTH:
                raise invalid(f"the body is nested too deeply; at most {MAX_JSON_DEPTH} levels are allowed")
            if num_containers > MAX_JSON_CONTAINERS:
                raise invalid(f"the body has more than {MAX_JSON_CONTAINERS} objects and lists; send several requests")
        elif closes:
            depth -= 1


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise invalid(f"the body has the key {printable(key)} twice; keys must be unique")
            seen.add(key)
    return value


def _no_constant(name: str) -> NoReturn:
    raise invalid(f"the body contains {name}, which is not valid JSON; numbers must be finite")
