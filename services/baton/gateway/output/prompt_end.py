"""Tells from the end of a rendered prompt whether the model begins inside of its reasoning."""

from collections.abc import Iterable
from functools import lru_cache

from baton.gateway.output.formats import ReasoningFormat
from baton.gateway.output.special_text import is_delimiter

_MAX_PREFILL = 64 * 1024
"""Longest beginning of a reasoning, in characters, that a prompt may give."""
_MAX_HEADER = 1024
"""The template writes the beginning of the model's message, with its special tokens, in fewer characters."""


def opens_reasoning(prompt: str, reasoning: ReasoningFormat, special_tokens: Iterable[str] = ()) -> bool:
    """Return True if the text after `prompt` belongs to the reasoning.

    That is so if the prompt ends with the opening delimiter, or with that and the beginning of a reasoning.
    A message of a client may contain the delimiter, too. It does not count, because the template writes
    special tokens behind every message.
    """
    return _opens_reasoning(prompt[-_MAX_PREFILL:], reasoning, frozenset(special_tokens))


@lru_cache(maxsize=16)  # all samples of a request have one prompt
def _opens_reasoning(tail: str, reasoning: ReasoningFormat, special_tokens: frozenset[str]) -> bool:
    opener, closer = reasoning.open.rstrip(), reasoning.close.strip()
    text = tail.rstrip()
    if text.endswith(opener):
        return True
    if text.endswith(closer):
        return False
    begin = tail.rfind(opener)
    if begin < 0 or not special_tokens or tail.find(closer, begin) >= 0:
        return reasoning.always_open
    after = tail[max(begin + len(opener), len(tail) - _MAX_HEADER) :]
    return reasoning.always_open or not any(token in after and is_delimiter(token) for token in special_tokens)
