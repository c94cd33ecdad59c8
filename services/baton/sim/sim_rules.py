"""Rules of simulated requests that forbid tokens, with a reference that shares no code with the workers."""

from collections.abc import Sequence
from dataclasses import dataclass

ALTERNATING_GRAMMAR = '{"grammars": [{"lark_grammar": "start: /([a-p][0-9])*/"}]}'
"""Letters and digits take turns. A matcher that has lost or repeated a token allows the wrong kind."""
LETTERS, DIGITS = tuple(range(ord("a"), ord("p") + 1)), tuple(range(ord("0"), ord("9") + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRules:
    """Rules of one request. A token of the simulated model is a byte.

    allowed: the only tokens that may be drawn, ascending; empty allows all.
    bad_words: token sequences that the answer must not contain.
    alternates: the answer must match `ALTERNATING_GRAMMAR`.
    """

    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    alternates: bool = False

    @property
    def grammar(self) -> str:
        """The grammar of the answer; empty without one."""
        return ALTERNATING_GRAMMAR if self.alternates else ""

    def choices(self, answer: Sequence[int], vocab_size: int) -> Sequence[int]:
        """Return the tokens that may follow an answer, ascending."""
        allowed: Sequence[int] = self.allowed or range(vocab_size)
        if self.alternates:
            kind = DIGITS if len(answer) % 2 else LETTERS
            allowed = [token for token in kind if not self.allowed or token in self.allowed]
        banned = {
            word[-1]
            for word in self.bad_words
            if len(word) <= len(answer) + 1 and tuple(answer[len(answer) + 1 - len(word) :]) == word[:-1]
        }
        return [token for token in allowed if token not in banned] if banned else allowed


NO_RULES = SimRules()
