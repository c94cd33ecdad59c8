"""Decodes a large JSON text in small pieces, so that other threads run in between.

`json.loads` holds the interpreter's lock while it decodes a list of numbers, or a long string, for 0.3 s if
the text has 12 MiB. Here each call of the C decoder gets at most `PIECE_CHARS` characters. It gets as many
elements of a list, or members of an object, as fit in a piece.

A long list of token ids becomes an `array`, because a list takes up to nine times its memory. All other
values are counted, and their number is bounded.
"""

import json
import re
from array import array
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from baton.core.errors import BatonError
from baton.core.request_limits import MIN_ARRAY_IDS, U32_MAX

PIECE_CHARS = 32 * 1024
"""Characters per call of the C decoder, about a millisecond."""
MIN_STRING_CHARS = 32
"""Smallest piece of a string."""
FIRST_STRING_CHARS = 64
"""First piece of a string with escapes. Each further one is twice as large, so short strings cost little."""
JSON_LISTS: Final = (list, tuple, array)
"""Types of a list in a decoded body. gRPC messages have tuples."""
_SPACE = re.compile(r"[ \t\n\r]*+")
_NUMBERS = re.compile(r"[-+0-9.eE, \t\n\r]*+")
"""Matches text that can only be numbers of a list."""
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_CONTAINER_LEVELS = 6
"""Levels of nesting that the C decoder gets at once. A text is searched for brackets at most once for each
level, so that the time does not depend on the nesting."""


def _container(levels: int) -> str:
    """Return the expression for an object or a list with at most so many levels. Its brackets may differ."""
    inner = f"|{_container(levels - 1)}" if levels > 1 else ""
    return rf'[\[{{](?:[^"\[\]{{}}]++|{_STRING}{inner})*+[\]}}]'


_CONTAINER = re.compile(_container(_CONTAINER_LEVELS), re.DOTALL)
_ITEMS = re.compile(rf'(?:(?:[^",\[\]{{}}]++|{_STRING}|{_container(_CONTAINER_LEVELS)})++,)*', re.DOTALL)
"""Matches elements of a list, or members of an object, each with a comma behind it.

The outer group is not possessive. In Python before 3.11.5, a possessive group ends within an incomplete
repetition.
"""
_ENDS_WITH_HALF_A_PAIR = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9A-Fa-f]{2}\Z")
_NO_END = "Unterminated string starting at"
_ESCAPE = "\\ud800"
"""The longest escape in a string."""
_SCALARS = frozenset((str, int, float, bool, type(None)))

_Values: TypeAlias = "list[Any] | array[int]"


class TooManyValues(BatonError):
    """A text has more values than allowed."""


def loads(
    text: str,
    *,
    object_pairs_hook: Callable[..., Any],
    parse_constant: Callable[[str], Any],
    max_values: int,
    piece_chars: int = PIECE_CHARS,
) -> Any:
    """Decode a text as `json.loads` does, but long lists of token ids as arrays. Its depth must be bounded.

    max_values: largest number of strings, numbers and constants. Ids in an array do not count.

    Raises ValueError for the same texts, and TooManyValues.
    """
    pieces = _Pieces(text, object_pairs_hook, parse_constant, max_values, piece_chars)
    value, end = pieces.value(pieces.skip_space(0))
    if (end := pieces.skip_space(end)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class _ValueCounter:
    """Counts the values of a text, and turns its long lists of token ids into arrays.

    It knows nothing of the text: the C decoder calls it, so a reference to the text would be a cycle.

    last_pairs: members of the object that was made last.
    """

    def __init__(self, object_of: Callable[..., Any], max_values: int) -> None:
        self.last_pairs: list[tuple[str, Any]] = []
        self._object_of = object_of
        self._values_left = max_values

    def count(self, num_values: int) -> None:
        self._values_left -= num_values
        if self._values_left < 0:
            raise TooManyValues("the text has too many values")

    def counted_object(self, pairs: list[tuple[str, Any]]) -> Any:
        """Return the object of these pairs, whose values the C decoder has made."""
        num_values = 2 * len(pairs)
        for index, (key, value) in enumerate(pairs):
            kind = type(value)
            if kind is list:
                pairs[index] = (key, self.counted_list(value))
                num_values -= 1
            elif kind is dict:
                num_values -= 1
        self.count(num_values)
        self.last_pairs = pairs
        return self._object_of(pairs)

    def counted_list(self, values: list[Any]) -> _Values:
        """Return a list that the C decoder has made: as an array if it is a long list of token ids."""
        ids = _as_ids(values) if len(values) >= MIN_ARRAY_IDS else None
        return self.with_counted_items(values) if ids is None else ids

    def with_counted_items(self, values: list[Any]) -> list[Any]:
        """Count the values of a list, and replace those lists in it that become arrays."""
        num_values = len(values)
        if not _SCALARS.issuperset(map(type, values)):
            for index, value in enumerate(values):
                kind = type(value)
                if kind is list:
                    values[index] = self.counted_list(value)
                    num_values -= 1
                elif kind is dict:
                    num_values -= 1
        self.count(num_values)
        return values


class _Pieces:
    """Decodes containers in Python, and their elements in C. Methods return values and the position after.

    If the C decoder refuses several elements together, the elements after them are decoded one by one, so
    that errors have the positions in the whole text.
    """

    def __init__(
        self,
        text: str,
        object_pairs_hook: Callable[..., Any],
        parse_constant: Callable[[str], Any],
        max_values: int,
        piece_chars: int,
    ) -> None:
        self._text = text
        self._object_of = object_pairs_hook
        self._values = _ValueCounter(object_pairs_hook, max_values)
        self._decoder = json.JSONDecoder(object_pairs_hook=self._values.counted_object, parse_constant=parse_constant)
        self._piece_chars = piece_chars
        self._is_malformed = False

    def skip_space(self, at: int) -> int:
        while True:
            match = _SPACE.match(self._text, at, at + self._piece_chars)
            assert match is not None
            if match.end() - at < self._piece_chars:
                return match.end()
            at = match.end()

    def value(self, at: int) -> tuple[Any, int]:
        """Decode the value that begins at `at`. A token id is not counted."""
        begin = self._text[at : at + 1]
        if begin == '"':
            return self._string(at)
        if begin in ("[", "{") and _CONTAINER.match(self._text, at, at + self._piece_chars) is None:
            return (self._list if begin == "[" else self._object)(at + 1)
        value, end = self._decoder.raw_decode(self._text, at)
        if begin == "[":
            value = self._values.counted_list(value)
        elif begin != "{" and not _is_id(value):
            self._values.count(1)
        return value, end

    def _items(self, at: int, brackets: str) -> tuple[Any, int]:
        """Decode as many elements or members as have a comma behind them in the next piece; None for none.

        Members are in `last_pairs`, too, because the C decoder makes the outer object last.
        """
        if self._is_malformed:
            return None, at
        match = _ITEMS.match(self._text, at, at + self._piece_chars)
        if match is None or (end := match.end()) == at:
            return None, at
        try:
            return self._decoder.decode(f"{brackets[0]}{self._text[at : end - 1]}{brackets[1]}"), end
        except json.JSONDecodeError:
            self._is_malformed = True
            return None, at

    def _string(self, at: int) -> tuple[str, int]:
        """Decode a string in pieces, each of which the C decoder gets in quotes."""
        self._values.count(1)
        begin, num_chars, parts = at + 1, FIRST_STRING_CHARS, []
        most_chars = max(self._piece_chars, MIN_STRING_CHARS)
        quote = self._text.find('"', begin, begin + most_chars)
        if quote >= 0 and self._text.find("\\", begin, quote) < 0:
            return self._decoder.raw_decode(self._text, at)
        while True:
            end = self._piece_end(begin, begin + min(num_chars, most_chars))
            try:
                part, num_read = self._decoder.raw_decode(f'"{self._text[begin:end]}"')
            except json.JSONDecodeError as error:
                place = at if error.msg.startswith(_NO_END) else begin + error.pos - 1
                raise json.JSONDecodeError(error.msg, self._text, place) from None
            parts.append(part)
            if num_read <= 1 + end - begin:  # the quote is in the text
                return "".join(parts), begin + num_read - 1
            if end >= len(self._text):
                raise json.JSONDecodeError(_NO_END, self._text, at)
            begin, num_chars = end, 2 * num_chars

    def _piece_end(self, begin: int, end: int) -> int:
        """Return `end`, or less, so that the piece of a string from `begin` on ends between two escapes, and
        not within the two of a surrogate pair."""
        if end >= len(self._text) or (last := self._text.rfind("\\", end - len(_ESCAPE), end)) < 0:
            return min(end, len(self._text))
        before = self._text[begin : last + 1]
        if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return end  # a backslash that is itself escaped
        if self._text[last + 1] != "u":
            return end if last + 2 <= end else last
        if last + len(_ESCAPE) < end:
            return end  # another character follows the escape
        return last - len(_ESCAPE) if _ENDS_WITH_HALF_A_PAIR.search(self._text, begin, last) else last

    def _list(self, at: int) -> tuple[_Values, int]:
        """Decode the elements of a list: as an array for as long as they are token ids."""
        values: _Values = array("I")
        at = self.skip_space(at)
        if self._text[at : at + 1] == "]":
            return [], at + 1
        while True:
            if isinstance(values, array):
                numbers, at = self._numbers(at)
                values = self._extended(values, numbers) if numbers else values
            else:
                items, at = self._items(at, "[]")
                values += self._values.with_counted_items(items or [])
            begin = self.skip_space(at)
            value, at = self.value(begin)
            values = self._extended(values, [value])
            at = self.skip_space(at)
            if (after := self._text[at : at + 1]) == "]":
                return self._list_or_array(values), at + 1
            if after != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)
            at = self.skip_space(at + 1)

    def _list_or_array(self, values: _Values) -> _Values:
        """Return a complete list: as an array only if it is a long list of token ids."""
        if len(values) >= MIN_ARRAY_IDS or isinstance(values, list):
            return values
        self._values.count(len(values))
        return values.tolist()

    def _extended(self, values: _Values, more: list[Any]) -> _Values:
        """Append elements, to a new list if not all are token ids. Elements of an array do not count."""
        if isinstance(values, array):
            if (ids := _as_ids(more)) is not None:
                values.extend(ids)
                return values
            self._values.count(len(values))
            values = values.tolist()
        else:
            self._values.count(_is_id(more[0]))
        values += more
        return values

    def _numbers(self, at: int) -> tuple[list[Any], int]:
        """Decode as many numbers as have a comma behind them in the next piece."""
        match = _NUMBERS.match(self._text, at, at + self._piece_chars)
        assert match is not None
        end = self._text.rfind(",", at, match.end())
        if end < 0:
            return [], at
        try:
            numbers: list[Any] = self._decoder.decode(f"[{self._text[at:end]}]")
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, self._text, at + error.pos - 1) from None
        if not numbers:  # only a comma
            raise json.JSONDecodeError("Expecting value", self._text, end)
        if _as_ids(numbers) is None:
            self._values.count(len(numbers))
        return numbers, end + 1

    def _object(self, at: int) -> tuple[Any, int]:
        pairs: list[tuple[str, Any]] = []
        at = self.skip_space(at)
        if self._text[at : at + 1] == "}":
            return self._object_of(pairs), at + 1
        while True:
            members, at = self._items(at, "{}")
            if members is not None:
                pairs += self._values.last_pairs
                at = self.skip_space(at)
            if self._text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            key, at = self._string(at)
            at = self.skip_space(at)
            if self._text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", self._text, at)
            value, at = self.value(self.skip_space(at + 1))
            self._values.count(_is_id(value))
            pairs.append((key, value))
            at = self.skip_space(at)
            if (after := self._text[at : at + 1]) == "}":
                return self._object_of(pairs), at + 1
            if after != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)
            at = self.skip_space(at + 1)


def _as_ids(values: list[Any]) -> "array[int] | None":
    """Return integers of 32 bits without a sign as an array; None if a value is none."""
    if set(map(type, values)) != {int}:
        return None
    try:
        return array("I", values)
    except OverflowError:
        return None


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= U32_MAX
