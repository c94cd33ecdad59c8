"""Writes JSON strings."""

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
