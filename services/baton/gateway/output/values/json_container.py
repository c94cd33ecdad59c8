"""Checks and rewrites a JSON object or list that arrives in pieces, at a small cost for each piece."""

import math
import re
from typing import NamedTuple

from baton.gateway.output.text_buffer import TextBuffer
from baton.gateway.output.values.json_escape import quote, to_text

MAX_JSON_DEPTH = 200
"""Objects and lists that are nested deeper stay strings."""
_MAX_SCALAR = 4300  # digits of the longest integer that Python reads

_TOKEN = re.compile(r'[ \t\n\r]*(?:(?P<mark>[\[\]{},:"])|(?P<scalar>[-+.0-9A-Za-z]+))')
_STRING = re.compile(r'[^"\\\x00-\x1f]*(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*)*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class JsonContainer(NamedTuple):
    """A JSON object or list, rewritten as `json.dumps` writes it."""

    text: str
    is_object: bool


class _List:
    """A list that is open."""

    __slots__ = ("_items", "key")

    def __init__(self) -> None:
        self._items = TextBuffer()
        self.key = ""  # has none

    def add(self, value: str) -> None:
        self._items.append(f", {value}")

    def text(self) -> str:
        return f"[{self._items.joined()[2:]}]"


class _Object:
    """An object that is open. If a key comes twice, the last value counts."""

    __slots__ = ("_members", "key")

    def __init__(self) -> None:
        self.key = ""
        self._members: dict[str, str] = {}

    def add(self, value: str) -> None:
        self._members[self.key] = f"{self.key}: {value}"

    def text(self) -> str:
        return f"{{{', '.join(self._members.values())}}}"


class JsonContainerReader:
    """Reads one JSON object or list, and white space around it.

    The result equals `json.dumps(json.loads(text), ensure_ascii=False)`. A number that no double can hold
    keeps its digits. `Infinity` and `NaN` are no JSON, and lone surrogates become U+FFFD.
    """

    __slots__ = ("_expected", "_is_malformed", "_open", "_rest", "_result", "_string")

    def __init__(self) -> None:
        self._open: list[_List | _Object] = []
        self._expected = "[{"  # marks that may come next; `v` stands for a scalar or string, `k` for a key
        self._string: TextBuffer | None = None  # of the string that is open, behind its quote
        self._rest = ""  # beginning of a scalar, or of an escape
        self._result: JsonContainer | None = None
        self._is_malformed = False

    def put(self, text: str) -> None:
        """Add text."""
        if self._is_malformed:
            return
        try:
            self._read(self._rest + text)
        except ValueError:
            self._is_malformed = True
            self._open.clear()
            self._string = self._result = None

    @property
    def is_in_string(self) -> bool:
        """True if the text so far ends inside of a string, and is the beginning of an object or list."""
        return self._string is not None

    def finish(self) -> JsonContainer | None:
        """Return the whole value; None if the text is something else."""
        return None if self._rest else self._result

    def _read(self, text: str) -> None:
        """Read text up to its last complete token. Raises ValueError if it is malformed."""
        pos, self._rest = 0, ""
        if not self._open:
            pos = len(text) - len(text.lstrip())
        while pos < len(text):
            if self._string is not None:
                pos = self._read_string(text, pos, self._string)
                continue
            token = _TOKEN.match(text, pos)
            if token is None:
                if text[pos:].strip(" \t\n\r" if self._open else None):
                    raise ValueError("no token of JSON")
                return
            pos = token.end()
            if token.lastgroup == "mark":
                self._read_mark(text[pos - 1])
            elif pos < len(text):
                self._add(_scalar(token["scalar"]), is_string=False)
            else:
                self._rest = token["scalar"]
                if len(self._rest) > _MAX_SCALAR:
                    raise ValueError("the number is too long")

    def _read_string(self, text: str, pos: int, string: TextBuffer) -> int:
        """Read a part of a string, and its end if it is there. Return the position after it."""
        found = _STRING.match(text, pos)
        end = pos if found is None else found.end()
        string.append(text[pos:end])
        if end == len(text) or (end == len(text) - 1 and text[end] == "\\"):
            self._rest = text[end:]
            return len(text)
        value = to_text(f'"{string.joined()}"') if text[end] == '"' else None
        if value is None:
            raise ValueError("the string is malformed")
        self._string = None
        self._add(quote(value), is_string=True)
        return end + 1

    def _read_mark(self, mark: str) -> None:
        if mark == '"' and self._expected[:1] in ("k", "v"):
            self._string = TextBuffer()
            return
        if mark not in self._expected:
            raise ValueError(f"{mark} is not expected")
        if mark in "]}":
            self._close()
        elif mark == ":":
            self._expected = "v[{"
        elif mark == ",":
            self._expected = "k" if isinstance(self._open[-1], _Object) else "v[{"
        elif len(self._open) == MAX_JSON_DEPTH:
            raise ValueError("it is nested too deeply")
        else:
            self._open.append(_List() if mark == "[" else _Object())
            self._expected = "v[{]" if mark == "[" else "k}"

    def _add(self, value: str, *, is_string: bool) -> None:
        """Add a key, or a value that is no object or list."""
        if self._expected.startswith("k") and is_string:
            self._open[-1].key = value
            self._expected = ":"
        elif self._expected.startswith("v"):
            self._add_value(value)
        else:
            raise ValueError("no value is expected")

    def _add_value(self, value: str) -> None:
        self._open[-1].add(value)
        self._expected = ",}" if isinstance(self._open[-1], _Object) else ",]"

    def _close(self) -> None:
        closed = self._open.pop()
        if self._open:
            self._add_value(closed.text())
        else:
            self._result = JsonContainer(closed.text(), isinstance(closed, _Object))
            self._expected = ""


def _scalar(text: str) -> str:
    """Return a scalar as `json.dumps` writes it. Raises ValueError if it is none."""
    if text in ("true", "false", "null"):
        return text
    number = _NUMBER.fullmatch(text)
    if number is None:
        raise ValueError("not a number")
    if number.lastindex is None:
        return str(int(text))
    value = float(text)
    return repr(value) if math.isfinite(value) else text
