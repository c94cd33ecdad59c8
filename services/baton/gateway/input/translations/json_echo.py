"""Encodes fields of a request that its response repeats.

A client decides their size. They are encoded in pieces, so that other threads run in between.
"""

import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

PIECE_CHARS = 32 * 1024
"""Characters of a string that are encoded in one call."""


def encode_echo(fields: Mapping[str, Any]) -> bytes:
    """Return the fields as the inside of a JSON object."""
    text = bytearray()
    for name, value in fields.items():
        text += b'%s"%s": ' % (b", " if text else b"", name.encode())
        for piece in _pieces(value):
            text += piece.encode()
    return bytes(text)


def _pieces(value: object) -> Iterator[str]:
    """Yield the JSON text of a decoded value. Its depth is bounded."""
    if isinstance(value, str) and len(value) > PIECE_CHARS:
        yield '"'
        for at in range(0, len(value), PIECE_CHARS):
            yield json.dumps(value[at : at + PIECE_CHARS])[1:-1]
        yield '"'
    elif isinstance(value, Mapping):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield f"{', ' if number else ''}{json.dumps(key)}: "
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, list | tuple | array):
        yield "["
        for number, item in enumerate(value):
            if number:
                yield ", "
            yield from _pieces(item)
        yield "]"
    else:
        yield json.dumps(value)
