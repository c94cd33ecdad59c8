"""Token ids to text, one token at a time, without ever showing half a character.

What is shown, put together, is what decoding all ids at once gives; an id that has no text shows as U+FFFD.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_UNFINISHED_TOKENS = 4
"""Tokens that one character can be spread over: UTF-8 takes at most 4 bytes, a token at least one."""


class Detokenizer(Protocol):
    """One sample's text as it grows."""

    def put(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        ...

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD: no more tokens will come."""
        ...


class BytesDetokenizer:
    """For tokens that are bytes: `table[token_id]` is the token's bytes, None for an id that has no text
    (also any id past its end)."""

    __slots__ = ("_decode", "_decoder", "_size", "_table")

    def __init__(self, table: Sequence[bytes | None]) -> None:
        self._table = table
        self._size = len(table)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = self._decoder.decode

    def put(self, token_id: int) -> str:
        token = self._table[token_id] if token_id < self._size else None
        if token is not None:
            return self._decode(token)
        return self.flush() + REPLACEMENT

    def flush(self) -> str:
        text = self._decode(b"", True)
        self._decoder.reset()
        return text


class WindowDetokenizer:
    """For tokenizers whose text of a token depends on its neighbours (a leading space that is stripped, byte
    fallback): decodes a short window twice, with and without the new tokens, and shows the difference. As
    vLLM and text-generation-inference do."""

    __slots__ = ("_decode", "_has_text", "_ids", "_read", "_start")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], has_text: Callable[[int], bool], prompt_tail: Sequence[int] = ()
    ) -> None:
        """`prompt_tail`: the last few prompt ids, so that the first token's text is that of a
        continuation."""
        self._decode = decode
        self._has_text = has_text
        self._ids = list(prompt_tail)
        self._start = 0
        self._read = len(self._ids)

    def put(self, token_id: int) -> str:
        if not self._has_text(token_id):
            text = self.flush() + REPLACEMENT
            self._ids, self._start, self._read = [], 0, 0
            return text
        self._ids.append(token_id)
        shown = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if (len(text) <= len(shown) or text.endswith(REPLACEMENT)) and len(
            self._ids
        ) - self._read < MAX_UNFINISHED_TOKENS:
            return ""
        self._start, self._read = self._read, len(self._ids)
        if self._start > 64:  # forget what no window reaches any more
            del self._ids[: self._start]
            self._read -= self._start
            self._start = 0
        return text[len(shown) :]

    def flush(self) -> str:
        shown = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        self._start, self._read = self._read, len(self._ids)
        return text[len(shown) :]
