"""Searches a pattern in text that arrives in pieces, in time linear in the text.

The threads of a program are kept in the order in which a backtracking matcher would try them. The first match
is therefore the one that `re` finds in the whole text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.gateway.output.templates.pattern import Pattern, Target

MAX_DELIMITER = 512
"""Longest delimiter in a stream. A longer match is dropped, which bounds the text that is held back."""
_PORTION = 256


@dataclass(frozen=True, slots=True)
class Match:
    """A match of a pattern, with the texts of its named groups that took part in it."""

    start: int
    end: int
    groups: Mapping[str, str] = field(default_factory=dict)


class _Thread(NamedTuple):
    """A possible match: its next instruction, its beginning, and boundaries of named groups (-1: none)."""

    step: int
    start: int
    spans: tuple[int, ...]


class PatternScan:
    """Search for the first match of a pattern from a position on. Positions are indexes of the text.

    is_decided: True if no further text can change `match`.
    """

    __slots__ = ("_at", "_max_length", "_pattern", "_threads", "is_decided", "match")

    def __init__(self, pattern: Pattern, max_length: int | None = None) -> None:
        """Create a search. Matches longer than `max_length` are given up."""
        self._pattern = pattern
        self._max_length = max_length
        self.restart(0)

    def restart(self, begin: int) -> None:
        """Search from `begin` on."""
        self._at = begin
        self._threads: list[_Thread] = []
        self.match: Match | None = None
        self.is_decided = False

    def shift(self, count: int) -> None:
        """Follow the text, of which `count` characters before any possible match were removed."""
        self._at -= count
        self._threads = [_moved(thread, count) for thread in self._threads]
        if self.match is not None:
            self.match = Match(self.match.start - count, self.match.end - count, self.match.groups)

    @property
    def pending(self) -> int | None:
        """Beginning of the first match that is possible, but not decided; None if there is none."""
        if self.is_decided:
            return None
        starts = [thread.start for thread in self._threads[:1]]
        return min([*starts, self.match.start]) if self.match is not None else (starts[0] if starts else None)

    def run(self, text: str, *, begins: bool, final: bool, limit: int | None = None) -> None:
        """Go on with the search in the whole text so far.

        begins: the text begins where `^` matches.
        final: no more text comes.
        limit: matches that begin behind this do not matter.
        """
        while not self.is_decided:
            at = self._at
            if not self._threads:
                if self.match is not None:
                    self.is_decided = True
                    return
                at = self._at = self._next_start(text, at)
                if limit is not None and at > limit:
                    self.is_decided = True
                    return
            if at >= len(text) and not final:
                return
            if self.match is None and (limit is None or at <= limit):
                self._start(text, at, at_begin=begins and at == 0)
            if at >= len(text):
                self._end(text)
            elif not self._cut_at_match(text, at):
                self._step(text, at)

    def _next_start(self, text: str, at: int) -> int:
        if at == 0 and self._pattern.has_empty_match:
            return at
        found = self._pattern.first.search(text, at)
        return len(text) if found is None else found.start()

    def _start(self, text: str, at: int, *, at_begin: bool) -> None:
        known = {thread.step for thread in self._threads}
        thread = _Thread(-1, at, (-1,) * (2 * len(self._pattern.group_names)))
        _extend(self._threads, thread, self._pattern.targets[at_begin], at, known)
        self._cut_at_match(text, at)

    def _step(self, text: str, at: int) -> None:
        """Consume the character at `at`."""
        program, consumes, char = self._pattern.program, self._pattern.consumes, text[at]
        oldest = -1 if self._max_length is None else at + 1 - self._max_length
        threads: list[_Thread] = []
        known: set[int] = set()
        for thread in self._threads:
            instruction = program[thread.step]
            if not instruction.at and thread.start >= oldest and consumes(instruction, char):
                _extend(threads, thread, instruction.after, at + 1, known)
        self._threads = threads
        self._at = at + 1
        self._cut_at_match(text, at + 1)

    def _end(self, text: str) -> None:
        """Decide at the end of the text."""
        for thread in self._threads:
            if self._pattern.program[thread.step].at == "end":
                found: list[_Thread] = []
                _extend(found, thread, self._pattern.at_end(thread.step), len(text), set())
                match = next((other for other in found if self._pattern.program[other.step].is_match), None)
                if match is not None:
                    self._set_match(text, match, len(text))
                    break
        self._threads = []
        self.is_decided = True

    def _cut_at_match(self, text: str, at: int) -> bool:
        """Note the first match among the threads, and drop those of lower priority."""
        for number, thread in enumerate(self._threads):
            if self._pattern.program[thread.step].is_match:
                self._set_match(text, thread, at)
                del self._threads[number:]
                return not self._threads
        return False

    def _set_match(self, text: str, thread: _Thread, end: int) -> None:
        spans = thread.spans
        groups = {
            name: text[spans[2 * number] : spans[2 * number + 1]]
            for number, name in enumerate(self._pattern.group_names)
            if spans[2 * number + 1] >= 0
        }
        self.match = Match(thread.start, end, groups)


def _extend(threads: list[_Thread], origin: _Thread, targets: tuple[Target, ...], at: int, known: set[int]) -> None:
    """Add threads that go on from `origin` at targets that no thread of higher priority has reached."""
    for index, saves in targets:
        if index in known:
            continue
        known.add(index)
        spans = origin.spans
        for save in saves:
            spans = (*spans[:save], at, *spans[save + 1 :])
        threads.append(_Thread(index, origin.start, spans))


def _moved(thread: _Thread, count: int) -> _Thread:
    spans = tuple(position - count if position >= 0 else position for position in thread.spans)
    return _Thread(thread.step, thread.start - count, spans)


class MatchFinder:
    """Finds all matches of a pattern in text that arrives in pieces, from left to right.

    The pattern does not match the empty text. The text is searched in portions, so that joining it stays
    cheap while a match does not end.
    """

    __slots__ = ("_begins", "_matches", "_new", "_num_new", "_scan", "_text")

    def __init__(self, pattern: Pattern) -> None:
        self._scan = PatternScan(pattern)
        self._text = ""
        self._begins = True
        self._new: list[str] = []
        self._num_new = 0
        self._matches: list[Match] = []

    def put(self, text: str) -> None:
        """Add text."""
        self._new.append(text)
        self._num_new += len(text)
        if self._num_new >= _PORTION:
            self._search(final=False)

    def finish(self) -> list[Match]:
        """Return the matches. Their positions do not count from the beginning of the text."""
        self._search(final=True)
        return self._matches

    def _search(self, *, final: bool) -> None:
        self._text = "".join([self._text, *self._new])
        self._new.clear()
        self._num_new = 0
        while True:
            self._scan.run(self._text, begins=self._begins, final=final)
            if not self._scan.is_decided or self._scan.match is None:
                break
            self._matches.append(self._scan.match)
            self._drop(self._scan.match.end)
            self._scan.restart(0)
        done = len(self._text) if self._scan.pending is None else self._scan.pending
        self._drop(done)
        self._scan.shift(done)

    def _drop(self, count: int) -> None:
        if count:
            self._text = self._text[count:]
            self._begins = False
