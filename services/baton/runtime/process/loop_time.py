"""Limits of the work that runs on the event loop at a time. Most larger work runs in a thread.

A callback of the event loop delays every open stream. Work of each of these sizes takes 1 to 3 ms on one core
of a server, at most 5 ms. Threads take the interpreter lock for at most 5 ms at a time, because they work in
pieces. `baton_event_loop_lag_seconds` shows what was reached, and the cost fuzzing fails above 50 ms.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

JSON_BYTES = 32 * 1024
"""JSON body that is parsed and validated."""
SCHEMA_BYTES = 8 * 1024
"""JSON body with a schema or grammar that is validated."""
MESSAGE_BYTES = 32 * 1024
"""Message of gRPC that is decoded."""
TOKENIZED_CHARACTERS = 16 * 1024
"""Text that is converted to token ids."""
LIBRARY_CHARACTERS = 4 * 1024
"""The same, if `tokenizers` converts it, which takes up to 0.8 µs a character."""
DETOKENIZED_IDS = 1024
"""Token ids that are converted to text before other callbacks run."""
TEMPLATE_MESSAGES = 64
"""Messages of a chat that are rendered."""
TEMPLATE_CHARACTERS = 32 * 1024
"""Characters of a chat that are rendered: of its messages, tools, documents and variables."""
TEMPLATE_S = 0.005
"""Processor time of rendering a chat, which is then begun again in a thread. A template is a program, so its
cost does not follow from the sizes."""
JSON_IDS = 8 * 1024
"""Token ids that are formatted as JSON."""
MESSAGE_IDS = 16 * 1024
"""Token ids that are packed into a message of gRPC."""
JSON_CHARACTERS = 128 * 1024
"""Text that is formatted as JSON or as a message of gRPC."""


async def call(size: int, most: int, function: Callable[[], T]) -> T:
    """Return `function()`. It is called in a thread if the size of its work is above `most`."""
    return function() if size <= most else await asyncio.to_thread(function)
