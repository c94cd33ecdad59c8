"""Keeps special tokens apart from plain text with the same characters.

Inside of the parsers, a special token that matters to a format is one surrogate code point. Detokenized text
never contains surrogates, so a token cannot be confused with text that spells it.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from baton.gateway.output.formats import Piece, SpecialToken

_FIRST_SURROGATE = 0xD800
_NUM_SURROGATES = 0x800
_SURROGATES = re.compile("[\ud800-\udfff]")


def split_special(text: str, special_tokens: Iterable[str]) -> tuple[Piece, ...]:
    """Split a delimiter into its special tokens and the plain text between them.

    Where several tokens match, the first position counts, then the longest token. Tokens that are no
    delimiters are left out: see `is_delimiter`.
    """
    tokens = sorted(
        {token for token in special_tokens if token in text and is_delimiter(token)},
        key=lambda token: (-len(token), token),
    )
    if not tokens:
        return (text,) if text else ()
    found = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    return tuple(SpecialToken(part) if odd else part for part, odd in zip(found, _alternate(), strict=False) if part)


def is_delimiter(token: str) -> bool:
    """Return True if an added token can be a delimiter.

    Some tokenizers add words, digits and runs of whitespace, which are plain text for a format.
    """
    return len(token) > 1 and not token.isspace() and not token.isalnum()


def _alternate() -> Iterable[bool]:
    while True:
        yield False
        yield True


@lru_cache(maxsize=64)
def special_text(delimiters: tuple[str, ...], special_tokens: frozenset[str]) -> "SpecialText":
    """Return the `SpecialText` of a format and a tokenizer, which all parsers share."""
    return SpecialText(delimiters, special_tokens)


class SpecialText:
    """Converts between pieces and text in which each known special token is one surrogate."""

    __slots__ = ("_codes", "_texts")

    def __init__(self, delimiters: Iterable[str], special_tokens: Iterable[str]) -> None:
        """Collect the special tokens that occur in the delimiters of a format."""
        special_tokens = tuple(special_tokens)
        used = {
            piece.text: None
            for delimiter in delimiters
            for piece in split_special(delimiter, special_tokens)
            if isinstance(piece, SpecialToken)
        }
        self._codes = {text: chr(_FIRST_SURROGATE + number) for number, text in enumerate(list(used)[:_NUM_SURROGATES])}
        self._texts = {code: text for text, code in self._codes.items()}

    def encode(self, piece: Piece) -> str:
        """Return a piece as text for the parser. A hidden token that the format does not know has no text."""
        if isinstance(piece, str):
            return piece if piece.isascii() else _SURROGATES.sub("\ufffd", piece)
        code = self._codes.get(piece.text)
        if code is None:
            return "" if piece.hidden else piece.text
        return code

    def delimiter(self, text: str) -> str:
        """Return a delimiter as it appears in encoded text."""
        return "".join(
            piece if isinstance(piece, str) else self._codes[piece.text] for piece in split_special(text, self._codes)
        )

    def decode(self, text: str) -> str:
        """Return encoded text with the special tokens spelled out."""
        if not self._texts or text.isascii():
            return text
        return _SURROGATES.sub(lambda match: self._texts.get(match.group(), "\ufffd"), text)
