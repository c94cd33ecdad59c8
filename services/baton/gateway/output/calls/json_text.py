"""Reads JSON that arrives in pieces and passes it on while it is checked.

Nothing is nested in Python's stack, so the depth of the JSON is bounded by its length only. In strings,
models write control characters and escapes that JSON does not have, such as `\\d`. They are escaped.
"""

import re

from baton.gateway.output.special_text import SpecialText
from baton.gateway.output.stream import Cursor, DelimiterSearch, Emit, Reading
from baton.gateway.output.values.json_escape import escape, quote, to_text

MAX_SHORT_STRING = 512
"""Longest string, with its escapes, that is read as a name, a key or an id."""
_MAX_SCALAR = 400

_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PREFIX = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_SHORT_STRING = re.compile(r'"(?:[^"\\\x00-\x1f\ud800-\udfff]|\\.)*"')

_BARE_KEY = re.compile(r'[^\s:{}\[\],"<>\ud800-\udfff]*')

_CLOSERS = {"{": "}", "[": "]"}


class JsonReader:
    """Reads JSON values, and the dialect with bare keys and a string delimiter."""

    __slots__ = ("_cursor", "_delimiter", "_special", "_string_end")

    def __init__(self, cursor: Cursor, special: SpecialText, string_delimiter: str = "") -> None:
        """Create a reader. With a `string_delimiter`, strings may also stand between two of them without
        escapes, and keys may have no quotes. Both are converted to JSON."""
        self._cursor = cursor
        self._special = special
        self._delimiter = special.delimiter(string_delimiter)
        self._string_end = DelimiterSearch((self._delimiter,))

    def value(self, emit: Emit) -> Reading[bool]:
        """Read one value and pass its text to `emit`.

        Returns False if it is malformed, with the cursor at the first wrong character, or if the text ends.
        """
        cursor = self._cursor
        closers: list[str] = []
        while True:  # each round reads a value, or the beginning of an object or list
            emit((yield from cursor.space()))
            opener = yield from cursor.match("{", "[")
            if opener:
                emit(opener)
                closers.append(_CLOSERS[opener])
                emit((yield from cursor.space()))
                if not (yield from cursor.sees(closers[-1:])):
                    if opener == "{" and not (yield from self._key(emit)):
                        return False
                    continue
            elif not (yield from self._string(emit)) and not (yield from self._scalar(emit)):
                return False
            while closers:  # after a value: a comma and the next value, or the end of objects and lists
                emit((yield from cursor.space()))
                found = yield from cursor.match(closers[-1], ",")
                emit(found)
                if found == ",":
                    emit((yield from cursor.space()))
                    if closers[-1] == "}" and not (yield from self._key(emit)):
                        return False
                    break
                if not found:
                    return False
                closers.pop()
            else:
                return True

    def _key(self, emit: Emit) -> Reading[bool]:
        """Read a key and the colon after it."""
        if not (yield from self._string(emit)) and not (yield from self._bare_key(emit)):
            return False
        emit((yield from self._cursor.space()))
        colon = yield from self._cursor.match(":")
        emit(colon)
        return bool(colon)

    def _bare_key(self, emit: Emit) -> Reading[bool]:
        if not self._delimiter:
            return False
        key = yield from read_chars(self._cursor, _BARE_KEY, MAX_SHORT_STRING)
        if key and not self._cursor.is_cut:
            emit(quote(key))
        return bool(key)

    def _string(self, emit: Emit) -> Reading[bool]:
        """Read a string if one begins here. Return False if there is none, or if it does not end."""
        cursor = self._cursor
        if (yield from cursor.sees(('"',))):
            return (yield from read_string(cursor, self._special, emit))
        if not self._delimiter or not (yield from cursor.match(self._delimiter)):
            return False
        emit('"')
        ended = yield from cursor.until(
            self._string_end, lambda text: emit(escape(self._special.decode(text))), in_call=True
        )
        if ended:
            emit('"')
        return bool(ended)

    def _scalar(self, emit: Emit) -> Reading[bool]:
        """Read a number, `true`, `false` or `null`. It is passed on when it is complete."""
        scalar = yield from read_chars(self._cursor, _SCALAR_CHARS, _MAX_SCALAR, accept=_SCALAR)
        emit(scalar)
        return bool(scalar)


def read_chars(
    cursor: Cursor, chars: re.Pattern[str], limit: int, accept: re.Pattern[str] | None = None
) -> Reading[str]:
    """Read the longest text that matches `chars`, a pattern for any number of characters of one set.

    Reads nothing and returns an empty string if there are more than `limit`, or if `accept` does not match
    the whole text.
    """
    while True:
        found = chars.match(cursor.text, cursor.pos)
        end = cursor.pos if found is None else found.end()
        if end < len(cursor.text) or cursor.final or end - cursor.pos > limit:
            break
        yield
    if end - cursor.pos > limit or (accept is not None and not accept.fullmatch(cursor.text, cursor.pos, end)):
        return ""
    return cursor.take(end)


def read_string(cursor: Cursor, special: SpecialText, emit: Emit) -> Reading[bool]:
    """Read a JSON string, which begins at the cursor. Return False if it is malformed or the text ends."""
    emit(cursor.take(cursor.pos + 1))
    while (yield from cursor.more()):
        plain = _PLAIN.match(cursor.text, cursor.pos)
        if plain is not None:
            emit(cursor.take(plain.end()))
            continue
        char = cursor.text[cursor.pos]
        if char == '"':
            emit(cursor.take(cursor.pos + 1))
            return True
        if char != "\\":  # a control character, or a special token
            emit(escape(special.decode(cursor.take(cursor.pos + 1))))
            continue
        escaped = _ESCAPE.match(cursor.text, cursor.pos)
        if escaped is not None:
            emit(cursor.take(escaped.end()))
        elif _ESCAPE_PREFIX.match(cursor.text, cursor.pos):
            if cursor.final:
                return False
            yield
        else:  # an escape that JSON does not have
            cursor.take(cursor.pos + 1)
            emit("\\\\")
    return False


def read_short_string(cursor: Cursor) -> Reading[str | None]:
    """Read a JSON string of at most `MAX_SHORT_STRING` characters and return its value; None if there is
    none."""
    while True:
        found = _SHORT_STRING.match(cursor.text, cursor.pos, cursor.pos + MAX_SHORT_STRING)
        if found is not None:
            break
        rest = len(cursor.text) - cursor.pos
        if cursor.final or rest >= MAX_SHORT_STRING or (rest and cursor.text[cursor.pos] != '"'):
            return None
        yield
    value = to_text(found.group())
    if value is not None:
        cursor.take(found.end())
    return value
