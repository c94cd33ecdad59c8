"""Writes and reads JSON strings."""

import json
import re

_NEEDS_ESCAPE = re.compile(r'["\\\x00-\x1f]')


def escape(text: str) -> str:
    """Return text as it stands inside of a JSON string. Characters outside of ASCII stay."""
    return json.dumps(text, ensure_ascii=False)[1:-1] if _NEEDS_ESCAPE.search(text) else text


def escaped_bytes(text: str) -> bytes:
    """Return the same in UTF-8."""
    return escape(text).encode()


def quote(text: str) -> str:
    """Return text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def to_text(string: str) -> str | None:
    """Return the value of a JSON string, in which lone surrogates become U+FFFD; None if it is malformed."""
    try:
        value: str = json.loads(string)
    except ValueError:
        return None
    return without_lone_surrogates(value)


def without_lone_surrogates(text: str) -> str:
    """Return text in which lone surrogates are U+FFFD. No client can read them, because UTF-8 has none."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
