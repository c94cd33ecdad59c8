"""Decides from the end of a rendered prompt if the answer begins as reasoning."""

from collections.abc import Iterable
from functools import lru_cache

from baton.gateway.output.formats import ReasoningFormat
from baton.gateway.output.special_text import is_delimiter

_MAX_PREFILL = 64 * 1024
"""Longest beginning of a reasoning, in characters, that a prompt may give."""
_MAX_HEADER = 1024
"""Characters that a template needs at most to begin the model's message, special tokens included."""


def opens_reasoning(prompt: str, reasoning: ReasoningFormat, special_tokens: Iterable[str] = ()) -> bool:
    """Return True if the text after `prompt` belongs to the reasoning.

    That is so if the prompt ends with the opening delimiter, or with that and the beginning of a reasoning.
    A message of a client may contain delimiters, too. They do not count, because the template writes special
    tokens behind every message.
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
    begin, end = tail.rfind(opener), tail.rfind(closer)
    if max(begin, end) < 0 or not special_tokens:
        return reasoning.always_open
    is_open = begin > end
    after = tail[max(begin + len(opener) if is_open else end + len(closer), len(tail) - _MAX_HEADER) :]
    is_in_message = any(token in after and is_delimiter(token) for token in special_tokens)
    return reasoning.always_open if is_in_message else is_open
