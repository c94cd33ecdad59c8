"""Stop strings, seen where text is made. What may be the beginning of one is held back until it is known not
to be."""

from collections.abc import Sequence


class StopMatcher:
    """Watches one sample's text for the first of several strings to occur."""

    __slots__ = ("_firsts", "_held", "_longest", "_prefixes", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._firsts = {stop[0] for stop in stops}
        self._prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def put(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string has been found). Once found, the shown text ends
        before it.

        Of several stop strings the one that is complete first counts, so that the answer does not depend on
        how the text was cut.
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
        """Text in which no stop string counts yet (`min_tokens`)."""
        text, self._held = self._held + text, ""
        return text

    def flush(self) -> str:
        """What was held back: no more text will come."""
        text, self._held = self._held, ""
        return text

    def _held_from(self, text: str) -> int:
        """Where the longest end of `text` that begins a stop string begins; `len(text)` if there is none."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[begin] in self._firsts and text[begin:] in self._prefixes:
                return begin
        return len(text)
