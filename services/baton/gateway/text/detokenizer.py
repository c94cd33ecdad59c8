"""Converts token ids to text, one token at a time, and never returns an incomplete character.

The returned texts joined together equal the text of decoding all ids in one call. An id without text becomes
U+FFFD.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_UNFINISHED_TOKENS = 4
"""Number of tokens that one character can span. UTF-8 takes at most 4 bytes, and a token has at least one."""


class Detokenizer(Protocol):
    """Incremental detokenizer of one sample."""

    def put(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Return an incomplete character at the end of the sample as U+FFFD; empty if there is none."""
        ...


class BytesDetokenizer:
    """Detokenizer for vocabularies in which every token is a fixed sequence of bytes."""

    __slots__ = ("_decode", "_decoder", "_size", "_table")

    def __init__(self, table: Sequence[bytes | None]) -> None:
        """Create a detokenizer. `table[token_id]` is the token's bytes; None, or no entry, means no text."""
        self._table = table
        self._size = len(table)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = self._decoder.decode

    def put(self, token_id: int) -> str:
        """Return the text that this token completes."""
        token = self._table[token_id] if token_id < self._size else None
        if token is not None:
            return self._decode(token)
        return self.flush() + REPLACEMENT

    def flush(self) -> str:
        """Return an incomplete character as U+FFFD."""
        text = self._decode(b"", True)
        self._decoder.reset()
        return text


class WindowDetokenizer:
    """Detokenizer for tokenizers in which a token's text depends on its neighbors.

    Examples are a leading space that is stripped, and byte fallback. It decodes a short window twice, with
    and without the new tokens, and returns the difference, as vLLM and text-generation-inference do.
    """

    __slots__ = ("_decode", "_has_text", "_ids", "_read", "_start")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], has_text: Callable[[int], bool], prompt_tail: Sequence[int] = ()
    ) -> None:
        """Create a detokenizer.

        decode: decodes a list of ids.
        has_text: True for ids in the vocabulary.
        prompt_tail: the last few prompt ids, on which the text of the first output token depends.
        """
        self._decode = decode
        self._has_text = has_text
        self._ids = list(prompt_tail)
        self._start = 0
        self._read = len(self._ids)

    def put(self, token_id: int) -> str:
        """Return the text that this token completes."""
        if not self._has_text(token_id):
            text = self.flush() + REPLACEMENT
            self._ids, self._start, self._read = [], 0, 0
            return text
        self._ids.append(token_id)
        returned = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        is_incomplete = len(text) <= len(returned) or text.endswith(REPLACEMENT)
        if is_incomplete and len(self._ids) - self._read < MAX_UNFINISHED_TOKENS:
            return ""
        self._start, self._read = self._read, len(self._ids)
        if self._start > 64:  # drop ids that no window needs any more
            del self._ids[: self._start]
            self._read -= self._start
            self._start = 0
        return text[len(returned) :]

    def flush(self) -> str:
        """Return an incomplete character as U+FFFD."""
        returned = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        self._start, self._read = self._read, len(self._ids)
        return text[len(returned) :]
