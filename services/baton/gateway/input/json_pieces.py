"""Decodes a large JSON text in small pieces, so that other threads run in between.

`json.loads` holds the interpreter's lock while it decodes a list of numbers or of lists, for 0.3 s if the
text has 12 MiB. Here each call of the C decoder gets at most `PIECE_CHARS` characters of such a list.
"""

import json
import re
from collections.abc import Callable
from typing import Any

PIECE_CHARS = 32 * 1024
"""Characters per call of the C decoder, about a millisecond."""
_SPACE = re.compile(r"[ \t\n\r]*+")
_NUMBERS = re.compile(r"[-+0-9.eE, \t\n\r]*+")
"""Matches text that can only be numbers of a list."""
_FLAT_OBJECT = re.compile(r'\{(?:[^"\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+\}', re.DOTALL)
"""Matches an object without lists and objects in it."""


def loads(
    text: str,
    *,
    object_pairs_hook: Callable[..., Any],
    parse_constant: Callable[[str], Any],
    piece_chars: int = PIECE_CHARS,
) -> Any:
    """Decode a text as `json.loads` does. Its depth must be bounded. Raises ValueError for the same texts."""
    decoder = json.JSONDecoder(object_pairs_hook=object_pairs_hook, parse_constant=parse_constant)
    pieces = _Pieces(text, decoder, piece_chars)
    value, end = pieces.value(pieces.skip_space(0))
    if (end := pieces.skip_space(end)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class _Pieces:
    """Decodes containers in Python, and their elements in C. Methods return values and the position after."""

    def __init__(self, text: str, decoder: json.JSONDecoder, piece_chars: int) -> None:
        self._text = text
        self._decoder = decoder
        self._piece_chars = piece_chars

    def skip_space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        assert match is not None
        return match.end()

    def value(self, at: int) -> tuple[Any, int]:
        """Decode the value that begins at `at`."""
        begin = self._text[at : at + 1]
        if begin == "[":
            return self._list(at + 1)
        if begin == "{" and _FLAT_OBJECT.match(self._text, at, at + self._piece_chars) is None:
            return self._object(at + 1)
        return self._decoder.raw_decode(self._text, at)

    def _list(self, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        at = self.skip_space(at)
        if self._text[at : at + 1] == "]":
            return values, at + 1
        while True:
            numbers, at = self._numbers(at)
            values += numbers
            value, at = self.value(self.skip_space(at))
            values.append(value)
            at = self.skip_space(at)
            if (after := self._text[at : at + 1]) == "]":
                return values, at + 1
            if after != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)
            at = self.skip_space(at + 1)

    def _numbers(self, at: int) -> tuple[list[Any], int]:
        """Decode as many numbers as have a comma behind them in the next piece."""
        match = _NUMBERS.match(self._text, at, at + self._piece_chars)
        assert match is not None
        end = self._text.rfind(",", at, match.end())
        if end < 0:
            return [], at
        try:
            numbers = self._decoder.decode(f"[{self._text[at:end]}]")
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, self._text, at + error.pos - 1) from None
        if not numbers:  # only a comma
            raise json.JSONDecodeError("Expecting value", self._text, end)
        return numbers, end + 1

    def _object(self, at: int) -> tuple[Any, int]:
        pairs: list[tuple[str, Any]] = []
        at = self.skip_space(at)
        if self._text[at : at + 1] == "}":
            return self._made(pairs), at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            key, at = self._decoder.raw_decode(self._text, at)
            at = self.skip_space(at)
            if self._text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", self._text, at)
            value, at = self.value(self.skip_space(at + 1))
            pairs.append((key, value))
            at = self.skip_space(at)
            if (after := self._text[at : at + 1]) == "}":
                return self._made(pairs), at + 1
            if after != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)
            at = self.skip_space(at + 1)

    def _made(self, pairs: list[tuple[str, Any]]) -> Any:
        assert self._decoder.object_pairs_hook is not None
        return self._decoder.object_pairs_hook(pairs)
