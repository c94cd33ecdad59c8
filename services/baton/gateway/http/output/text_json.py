"""Formats a text as a JSON string in pieces, a long one in a thread."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.input.client_call import ClientCall
from baton.gateway.input.tokenize_calls import decoded
from baton.gateway.text.tokenizer import Tokenizer
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


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The text of a prompt with which its choices begin.

    pieces: JSON form without the quotes.
    num_chars: length of the text.
    """

    pieces: Sequence[bytes] = ()
    num_chars: int = 0

    @property
    def num_bytes(self) -> int:
        """Length of the JSON form."""
        return sum(map(len, self.pieces))


NO_ECHO = EchoedPrompt()


async def echoed_prompts(call: ClientCall, tokenizer: Tokenizer) -> Sequence[EchoedPrompt]:
    """Return the text of each prompt, which all of its choices share; empty texts without `echo`."""
    if not call.output_options.echo:
        return [NO_ECHO] * len(call.requests)
    prompts = []
    for request, text in zip(call.requests, call.prompt_texts, strict=True):
        if text is None:
            text = await decoded(tokenizer, request.token_ids)
        await asyncio.sleep(0)  # formatting many short texts takes long, too
        prompts.append(EchoedPrompt((await format_long_text(text))[1:-1], len(text)))
    return prompts
