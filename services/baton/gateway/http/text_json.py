"""Formats a text as a JSON string in pieces, a long one in a thread."""

import asyncio
import json

INLINE_CHARS = 128 * 1024
"""A longer text is formatted in a thread. This length takes a millisecond or less."""
CHARS_PER_PIECE = 32 * 1024
"""Characters that are formatted in one call, during which no other thread runs."""


def format_text(text: str) -> list[bytes]:
    """Return the JSON string of a text. Joining the pieces of a long one would also take milliseconds."""
    pieces = (json.dumps(text[at : at + CHARS_PER_PIECE])[1:-1] for at in range(0, len(text), CHARS_PER_PIECE))
    return [b'"', *(piece.encode() for piece in pieces), b'"']


async def format_long_text(text: str) -> list[bytes]:
    """Return the JSON string of a text in pieces. A long one does not block the event loop."""
    return format_text(text) if len(text) <= INLINE_CHARS else await asyncio.to_thread(format_text, text)
