"""Finds stop strings in generated text. Text that may be the beginning of a stop string is held back."""

from array import array
from collections.abc import Sequence


class StopPatterns:
    """The stop strings of one call, prepared for the search. All samples of the call share one object.

    is_included: the delivered text ends with the stop string instead of before it.

    Its memory is linear in the length of the stop strings: per character one character and a 4-byte entry of
    the failure table (Knuth, Morris and Pratt, 1977).
    """

    __slots__ = ("firsts", "is_included", "stops", "tables")

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self.is_included = is_included
        self.stops = tuple(dict.fromkeys(stops))
        self.firsts = frozenset(stop[0] for stop in self.stops)
        self.tables = tuple(map(_failure_table, self.stops))

    def __bool__(self) -> bool:
        """True if there is any stop string."""
        return bool(self.stops)


def _failure_table(stop: str) -> "array[int]":
    """Return, for each length n > 0, the length of the longest proper border of `stop[:n]`, at index n - 1.

    A border is both a prefix and a suffix.
    """
    table = array("I", [0])
    border = 0
    for char in stop[1:]:
        while border and stop[border] != char:
            border = table[border - 1]
        border += stop[border] == char
        table.append(border)
    return table


class StopMatcher:
    """Searches one sample's text for the first occurrence of any of the call's stop strings.

    A character costs amortised constant time per stop string, however long the strings are. `found` is the
    stop string that was found, or empty.
    """

    __slots__ = ("_held", "_matched", "_patterns", "found")

    def __init__(self, patterns: StopPatterns) -> None:
        self._patterns = patterns
        self._matched = [0] * len(patterns.stops)
        self._held = ""
        self.found = ""

    def put(self, text: str) -> tuple[str, bool]:
        """Add text. Return (text that can be delivered now, True if a stop string was found).

        The delivered text ends before the stop string, or with it. If there are several, the one that ends
        first counts, and the longest of those that end together, so the result does not depend on how the
        text was divided into calls.
        """
        if not self._held and self._patterns.firsts.isdisjoint(text):
            return text, False
        found = self._search(text)
        if found is not None:
            end = len(self._held) + found[self._patterns.is_included]
            begin = len(self._held) + found[0]
            text = self._held + text
            self.found = text[begin : len(self._held) + found[1]]
            self._reset()
            return text[:end], True
        text = self._held + text
        num_held = max(self._matched, default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def pass_through(self, text: str) -> str:
        """Add text in which stop strings do not count yet, because of `min_tokens`. Return the text to
        deliver."""
        text = self._held + text
        self._reset()
        return text

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sample."""
        return self.pass_through("")

    def _search(self, text: str) -> tuple[int, int] | None:
        """Advance the partial matches over `text`.

        Returns the indices in `text` at which the found stop string begins and ends, or None. The first is
        negative if it begins in held text.
        """
        matched = self._matched
        found_end, found_length = len(text) + 1, 0
        for number, (stop, table) in enumerate(zip(self._patterns.stops, self._patterns.tables, strict=True)):
            length, full = matched[number], len(stop)
            for end, char in enumerate(text[:found_end], 1):
                while length and stop[length] != char:
                    length = table[length - 1]
                length += stop[length] == char
                if length == full:
                    if (end, -full) < (found_end, -found_length):
                        found_end, found_length = end, full
                    break
            matched[number] = length
        return (found_end - found_length, found_end) if found_length else None

    def _reset(self) -> None:
        self._held = ""
        self._matched = [0] * len(self._matched)
