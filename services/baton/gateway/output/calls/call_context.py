"""Shared state of the readers of tool calls."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.gateway.output.calls.json_text import read_chars
from baton.gateway.output.formats import ToolFormat
from baton.gateway.output.part_sink import PartSink
from baton.gateway.output.special_text import SpecialText
from baton.gateway.output.stream import Cursor, DelimiterSearch, Reading
from baton.gateway.output.values.typed_values import ToolTypes

MAX_NAME = 256
_NAME = re.compile(r"[^\s<>{}\[\]()\"'`;,=\\\x00-\x1f\x7f\ud800-\udfff]*")
_DELIMITERS = re.compile(r"[\ud800-\udfff]|<[^<>\s\ud800-\udfff]*>?|[^<\s\ud800-\udfff]+")


@dataclass(frozen=True, slots=True)
class CallContext:
    """Text, output and format of one message, for the reader of its calls.

    The text of a call is captured until its name and the beginning of its arguments are known to be correct.
    """

    cursor: Cursor
    sink: PartSink
    special: SpecialText
    types: ToolTypes
    tools: ToolFormat

    def announce(self, name: str, call_id: str = "") -> None:
        """Begin the call in the output. From then on its text cannot become content."""
        self.cursor.captured()
        self.sink.call(name, call_id)

    def delimiters(self, text: str) -> tuple[str, ...]:
        """Return the special tokens, tags and words of a text as they appear in the stream."""
        return tuple(_DELIMITERS.findall(self.special.delimiter(text)))

    def openings(self) -> dict[str, tuple[str, ...]]:
        """Return the delimiters between each trigger and the name of the first call."""
        syntax = self.tools.syntax
        before = syntax.section_begin + syntax.before_name
        return {
            self.special.delimiter(trigger): self.delimiters(before.partition(trigger)[2])
            for trigger in self.tools.triggers
        }

    def arguments(self, text: str) -> None:
        """Add text to the arguments, with special tokens spelled out."""
        self.sink.arguments(self.special.decode(text))

    def expect(self, delimiters: Sequence[str]) -> Reading[bool]:
        """Read delimiters with any whitespace before each. Return False at the first one that is missing."""
        for delimiter in delimiters:
            yield from self.cursor.space()
            if not (yield from self.cursor.match(delimiter)):
                return False
        return True

    def accept(self, delimiters: Sequence[str]) -> Reading[str]:
        """Read those of the delimiters that are there, in order. Return the last one that was."""
        last = ""
        for delimiter in delimiters:
            yield from self.cursor.space()
            last = (yield from self.cursor.match(delimiter)) or last
        return last

    def rest_of_arguments(self, search: DelimiterSearch) -> Reading[str]:
        """Pass malformed arguments on as they are, up to a delimiter, which is read and returned."""
        return (yield from self.cursor.until(search, self.arguments, in_call=True))


class CallReader(Protocol):
    """Reads the calls that begin with a trigger."""

    def read(self, trigger: str) -> Reading[bool]:
        """Read one call or several.

        The cursor is behind the trigger and captures. Returns False if a call is malformed and was not
        announced. In both cases the text that is still captured becomes content.

        trigger: as it appears in the stream. Empty for a bare call, which must name a tool of the request.
        """
        ...


def is_name(text: str) -> bool:
    """Return True for a text that can be the name of a tool."""
    return 0 < len(text) <= MAX_NAME and bool(_NAME.fullmatch(text))


def read_name(cursor: Cursor) -> Reading[str]:
    """Read the longest text that can be a name, and return it; empty if there is none or it is too long."""
    return (yield from read_chars(cursor, _NAME, MAX_NAME))
