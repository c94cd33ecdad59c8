"""Cuts a long text into pieces that can be encoded separately, with the same ids as the whole text.

The library takes about 150 bytes per token while it encodes a text, so a text of some MiB would take
hundreds of MiB. Pieces bound this, and their number of tokens is known before the rest is encoded.

A tokenizer with known pre-tokens encodes each of them separately. In all of their expressions a pre-token
ends after a letter or digit before ASCII punctuation or space, and after a letter before a digit. The same
holds for punctuation of East Asian scripts, which often have no spaces.
"""

import re
from collections.abc import Iterator

from baton.core.errors import invalid

PIECE_CHARS = 16 * 1024
"""Characters of a piece, if there is a place to cut. Encoding them takes 1 to 3 ms."""
MAX_PIECE_CHARS = 32 * 1024
"""A text with more characters without a place to cut is refused."""
_CUT = re.compile(
    r"(?<=[^\W_])(?=[\x00-/:-@\[-`{-\x7f\u2010-\u2027\u3000-\u3003\u3008-\u3011\uff01-\uff0f\uff1a-\uff20])"
    r"|(?<=[A-Za-z])(?=[0-9])"
)


class TextCutter:
    """Cuts texts for one tokenizer."""

    def __init__(self, added_tokens: frozenset[str]) -> None:
        """Create a cutter. `added_tokens` are never cut; the tokenizer finds them anywhere in a text."""
        self._added = re.compile("|".join(map(re.escape, sorted(added_tokens, key=len, reverse=True))))
        self._longest = max(map(len, added_tokens), default=0)

    def pieces(
        self, text: str, piece_chars: int = PIECE_CHARS, max_piece_chars: int = MAX_PIECE_CHARS
    ) -> Iterator[str]:
        """Yield pieces of at most `max_piece_chars`. Raises Refused (400) if there is no place to cut."""
        begin = 0
        while len(text) - begin > piece_chars:
            end = self._cut(text, begin + piece_chars // 2, begin + piece_chars)
            if end is None:
                end = self._cut(text, begin + piece_chars, begin + max_piece_chars)
            if end is None:
                end = self._cut(text, begin + 1, begin + piece_chars // 2)
            if end is None and len(text) - begin > max_piece_chars:
                raise invalid(
                    f"the text has more than {max_piece_chars:,} characters in a row without the end of a word; "
                    "insert spaces or punctuation, or send token ids"
                )
            yield text[begin:end]
            begin = len(text) if end is None else end
        if begin < len(text):
            yield text[begin:]

    def _cut(self, text: str, begin: int, end: int) -> int | None:
        """Return the first place to cut between two positions."""
        for match in _CUT.finditer(text, begin, end):
            if not self._is_in_added_token(text, match.start()):
                return match.start()
        return None

    def _is_in_added_token(self, text: str, at: int) -> bool:
        """True if an added token may begin before `at` and end after it."""
        for begin in range(max(0, at - self._longest + 1), at):
            if (match := self._added.match(text, begin)) is not None and match.end() > at:
                return True
        return False
