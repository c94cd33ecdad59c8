"""Reads text that arrives in pieces: a cursor whose operations wait for more text, and a delimiter search.

Parsers are generators. They yield where they need more text, so a format reads top to bottom like a parser of
a whole string. What they do depends on the text alone and not on how it was divided into pieces.
"""

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from baton.gateway.output.text_buffer import TextBuffer

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A parser that yields while it waits for more text, and returns a result."""

Emit = Callable[[str], None]
"""Receives text that was read."""

_SPACE = re.compile(r"[ \t\r\n]*")


class DelimiterSearch:
    """Finds the first of several delimiters. Of those that begin at one place the longest counts."""

    __slots__ = ("_delimiters", "_extendable", "_first", "_longest", "_pattern")

    def __init__(self, delimiters: Iterable[str]) -> None:
        self._delimiters = sorted({d for d in delimiters if d}, key=len, reverse=True)
        self._longest = len(self._delimiters[0]) if self._delimiters else 0
        self._pattern = re.compile("|".join(map(re.escape, self._delimiters)) or "(?!)")
        self._first = re.compile("|".join(re.escape(d[0]) for d in self._delimiters) or "(?!)")
        self._extendable = frozenset(
            d for d in self._delimiters if any(other != d and other.startswith(d) for other in self._delimiters)
        )

    def find(self, text: str, begin: int, final: bool) -> tuple[int, int]:
        """Return where the first delimiter at or after `begin` begins and ends.

        Without one, both are the position up to which the text cannot belong to a delimiter: the end of the
        text if `final`, else possibly less.
        """
        found = self._pattern.search(text, begin)
        if found is not None:
            start, end = found.span()
            if not final and end == len(text) and found.group() in self._extendable:
                return start, start
            return start, end
        hold = len(text) if final else self._hold(text, begin)
        return hold, hold

    def _hold(self, text: str, begin: int) -> int:
        """Return where the longest end of `text` begins that is the beginning of a delimiter."""
        for first in self._first.finditer(text, max(begin, len(text) - self._longest + 1)):
            if any(delimiter.startswith(text[first.start() :]) for delimiter in self._delimiters):
                return first.start()
        return len(text)


class Cursor:
    """Position in a text of which the rest may be still to come.

    Text before the position is dropped. `capture` keeps a copy of what is read from then on. So a call that
    turns out to be malformed is returned exactly as it was written.

    final: no more text comes.
    truncated: the text ends because of a limit of tokens, and not because the model ended it.
    num_put: characters of the whole text so far.
    """

    __slots__ = ("_captured", "final", "num_put", "pos", "text", "truncated")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.num_put = 0
        self.final = False
        self.truncated = False
        self._captured: TextBuffer | None = None

    def put(self, text: str) -> None:
        """Append text."""
        self.text = self.text[self.pos :] + text
        self.pos = 0
        self.num_put += len(text)

    @property
    def num_read(self) -> int:
        """Characters of the whole text before the position."""
        return self.num_put - len(self.text) + self.pos

    @property
    def at_end(self) -> bool:
        """True if all text was read and no more comes."""
        return self.final and self.pos == len(self.text)

    @property
    def is_cut(self) -> bool:
        """True if all text was read and a limit of tokens cut it here."""
        return self.truncated and self.at_end

    def take(self, end: int) -> str:
        """Read up to `end`, and return the text."""
        taken = self.text[self.pos : end]
        self.pos = end
        if self._captured is not None:
            self._captured.append(taken)
        return taken

    def capture(self, before: str = "") -> None:
        """Keep a copy of what is read from now on, after the text `before`."""
        self._captured = TextBuffer(before)

    def captured(self) -> str:
        """End the capture and return the copy; empty if there is no capture."""
        captured, self._captured = self._captured, None
        return "" if captured is None else captured.joined()

    def more(self) -> Reading[bool]:
        """Wait until there is a character at the position. Return False if the text ends here."""
        while self.pos >= len(self.text):
            if self.final:
                return False
            yield
        return True

    def space(self) -> Reading[str]:
        """Read whitespace and return it. The next character is then another one, or the text ends."""
        spaces = TextBuffer()
        while (yield from self.more()):
            end = _end_of_space(self.text, self.pos)
            if end == self.pos:
                break
            spaces.append(self.take(end))
        return spaces.joined()

    def sees(self, literals: Sequence[str]) -> Reading[str]:
        """Return which of the literals stands at the position, without reading it; empty if none does.

        If the text was cut inside of a literal, its beginning is read.
        """
        while True:
            may_follow = False
            for literal in literals:
                if self.text.startswith(literal, self.pos):
                    return literal
                may_follow = may_follow or literal.startswith(self.text[self.pos : self.pos + len(literal)])
            if self.final and self.truncated and may_follow:
                self.take(len(self.text))  # the beginning of a literal
            if self.final or not may_follow:
                return ""
            yield

    def match(self, *literals: str) -> Reading[str]:
        """Read one of the literals if it stands at the position. Return it, or an empty string."""
        literal = yield from self.sees(literals)
        if literal:
            self.take(self.pos + len(literal))
        return literal

    def until(self, search: DelimiterSearch, emit: Emit, *, in_call: bool = False) -> Reading[str]:
        """Pass the text before the next delimiter to `emit` as it comes. Read and return the delimiter.

        Returns an empty string if the text ends without one. If it was cut `in_call`, an end that may begin
        the delimiter is left out: the arguments are a beginning of those that the model would have written.
        """
        while True:
            is_cut = self.final and self.truncated and in_call
            begin, end = search.find(self.text, self.pos, self.final and not is_cut)
            if begin > self.pos:
                emit(self.take(begin))
            if end > begin:
                return self.take(end)
            if self.final:
                self.take(len(self.text))
                return ""
            yield


def _end_of_space(text: str, begin: int) -> int:
    found = _SPACE.match(text, begin)
    return begin if found is None else found.end()
