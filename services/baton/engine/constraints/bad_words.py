"""Bad words: token sequences that a response must not contain."""

from collections.abc import Sequence

from baton.core.kv.block_hash import TokenIds, token_ids


class BadWords:
    """Finds the tokens that would complete a bad word.

    Its cost a token is one look-up for each length that a word has, however many words there are.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._last_by_begin: dict[int, dict[bytes, set[int]]] = {}  # tokens but the last -> last tokens, by length
        for word in words:
            begins = self._last_by_begin.setdefault(len(word) - 1, {})
            begins.setdefault(token_ids(word[:-1]).tobytes(), set()).add(word[-1])

    def banned_after(self, outputs: TokenIds) -> set[int]:
        """Return the tokens that complete a word of which the last `outputs` are the other tokens."""
        banned: set[int] = set()
        for length, begins in self._last_by_begin.items():
            if length <= len(outputs):
                banned |= begins.get(outputs[len(outputs) - length :].tobytes(), set())
        return banned
