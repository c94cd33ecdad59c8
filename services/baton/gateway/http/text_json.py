"""Formats a text as a JSON string in pieces, a long one in a thread."""

import json

from baton.runtime.process import loop_time

CHARS_PER_PIECE = 32 * 1024
"""Characters that are formatted in one call, during which no other thread runs."""


def format_text(text: str) -> list[bytes]:
    """Return the JSON string of a text. Joining the pieces of a long one would also take milliseconds."""
    pieces = (json.dumps(text[at : at + CHARS_PER_PIECE])[1:-1] for at in range(0, len(text), CHARS_PER_PIECE))
    return [b'"', *(piece.encode() for piece in pieces), b'"']


async def format_long_text(text: str) -> list[bytes]:
    """Return the JSON string of a text in pieces. A long one does not block the event loop."""
    return await loop_time.call(len(text), loop_time.JSON_CHARACTERS, lambda: format_text(text))
