"""Finds stop strings in generated text. Text that may be the beginning of a stop string is held back."""

from collections.abc import Sequence


class StopMatcher:
    """Searches one sample's text for the first occurrence of any of several stop strings."""

    __slots__ = ("_firsts", "_held", "_longest", "_prefixes", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._firsts = {stop[0] for stop in stops}
        self._prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def put(self, text: str) -> tuple[str, bool]:
        """Add text. Return (text that can be delivered now, True if a stop string was found).

        The delivered text ends before the stop string. If there are several, the one that ends first counts,
        so the result does not depend on how the text was divided into calls.
        """
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        begin = self._held_from(text)
        self._held = text[begin:]
        return text[:begin], False

    def pass_through(self, text: str) -> str:
        """Add text in which stop strings do not count yet, because of `min_tokens`. Return the text to
        deliver."""
        text, self._held = self._held + text, ""
        return text

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sample."""
        text, self._held = self._held, ""
        return text

    def _held_from(self, text: str) -> int:
        """Return the index of the longest suffix of `text` that is the beginning of a stop string.

        Returns `len(text)` if there is no such suffix.
        """
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[begin] in self._firsts and text[begin:] in self._prefixes:
                return begin
        return len(text)
