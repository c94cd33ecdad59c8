"""Reads calls whose parameters stand between delimiters, and converts them to JSON by the tool's schema."""

from collections.abc import Sequence

from baton.gateway.output.calls.call_context import CallContext, is_name, read_name
from baton.gateway.output.formats import ParameterSyntax
from baton.gateway.output.stream import DelimiterSearch, Reading
from baton.gateway.output.text_buffer import TextBuffer
from baton.gateway.output.values.json_container import JsonContainerReader
from baton.gateway.output.values.json_escape import escape, quote
from baton.gateway.output.values.typed_values import is_text, to_json

MAX_KEY = 256
_CONTAINERS = frozenset(("object", "array"))
_CONTROLS = frozenset("\t\r\n")  # no JSON string has them


class ParameterCallReader:
    """Implements `CallReader` for the layout PARAMETERS.

    A value ends at the closing delimiter that is followed by another delimiter of the call, and that is not
    inside of a JSON string. So a value may contain the text of the closing delimiter. Strings are streamed;
    other values are converted when they are complete.
    """

    __slots__ = (
        "_after_key",
        "_after_name",
        "_after_string_key",
        "_after_value",
        "_before_key",
        "_closers",
        "_context",
        "_followers",
        "_is_string",
        "_next_call",
        "_openings",
        "_syntax",
        "_value_end",
    )

    def __init__(self, context: CallContext, syntax: ParameterSyntax) -> None:
        self._context = context
        self._syntax = syntax
        calls = context.tools.syntax
        self._openings = context.openings()
        self._next_call = context.delimiters(calls.before_name.removeprefix(context.tools.triggers[0]))
        self._after_name = context.delimiters(calls.after_name)
        self._closers = context.delimiters(calls.after_arguments + calls.section_end)
        self._before_key = context.special.delimiter(syntax.before_key.strip())
        self._after_key = context.delimiters(syntax.after_key)
        self._after_string_key = context.delimiters(syntax.after_string_key)[-1:]
        self._is_string = False
        self._after_value = context.special.delimiter(syntax.after_value.strip())
        self._value_end = DelimiterSearch((self._after_value,))
        self._followers = (self._before_key, *self._closers)

    def read(self, trigger: str) -> Reading[bool]:
        """Read the calls up to the delimiter that ends all of them."""
        context, cursor = self._context, self._context.cursor
        opening: Sequence[str] = self._openings[trigger]
        while True:
            if not (yield from context.expect(opening)) or not (yield from self._call()):
                return False
            if cursor.at_end:
                return True
            cursor.capture(cursor.captured())
            last = yield from context.accept(self._closers)
            if last:
                cursor.captured()
            if not last or last == self._closers[-1] or not (yield from cursor.sees(self._next_call[:1])):
                return True
            cursor.capture()
            opening = self._next_call

    def _call(self) -> Reading[bool]:
        """Read a call from its name to its last parameter. Return False if it was not announced."""
        context, cursor = self._context, self._context.cursor
        yield from cursor.space()
        name = yield from read_name(cursor)
        if not is_name(name) or not (yield from context.expect(self._after_name)):
            return False
        yield from cursor.space()
        if not self._after_name and not (yield from cursor.sees(self._followers)):
            return False
        context.announce(name)
        context.sink.arguments("{")
        separator = ""
        while True:
            yield from cursor.space()
            cursor.capture()
            key = (yield from self._key()) if (yield from cursor.match(self._before_key)) else None
            if key is None:
                break
            cursor.captured()
            context.sink.arguments(f"{separator}{quote(key)}: ")
            if not (yield from self._value(self._types_of(name, key))):
                return True
            separator = ", "
        if not cursor.is_cut:
            context.sink.arguments("}")
            context.sink.end_call()
        return True

    def _types_of(self, tool: str, key: str) -> tuple[str, ...]:
        """Return the types of the value after `_key`."""
        if self._after_string_key:
            return ("string",) if self._is_string else ()
        return self._context.types.of(tool, key)

    def _key(self) -> Reading[str | None]:
        """Read a key and the delimiters after it. Return None if they are malformed."""
        cursor, end = self._context.cursor, self._after_key[0]
        while True:
            index = cursor.text.find(end, cursor.pos)
            key = cursor.text[cursor.pos : index if index >= 0 else len(cursor.text)]
            if len(key) > MAX_KEY or "\n" in key:
                return None
            if index < 0 and cursor.final:
                cursor.take(len(cursor.text) if cursor.truncated else cursor.pos)
                return None
            if index >= 0:
                break
            yield
        cursor.take(index)
        *before, last = self._after_key
        if not (yield from self._context.expect(before)):
            return None
        yield from cursor.space()
        found = yield from cursor.match(last, *self._after_string_key)
        if not found:
            return None
        self._is_string = found in self._after_string_key
        return self._context.special.decode(key).strip()

    def _value(self, types: tuple[str, ...]) -> Reading[bool]:
        """Read a value and its closing delimiter. Return False if the text ends before."""
        context, cursor, syntax = self._context, self._context.cursor, self._syntax
        if syntax.after_key.endswith("\n"):
            yield from cursor.match("\n")
        value = _Value(context, types, syntax)
        while (yield from cursor.until(self._value_end, value.put, in_call=True)):
            cursor.capture(self._after_value)
            yield from cursor.space()
            is_followed = (yield from cursor.sees(self._followers)) or cursor.at_end
            closing = cursor.captured()
            if is_followed and not self._is_content(closing, value):
                value.finish()
                return True
            value.put(closing)
        return False

    def _is_content(self, closing: str, value: "_Value") -> bool:
        """True if a closing delimiter and the space after it are part of a JSON string.

        A special token is none, nor is a delimiter with which the model has ended the message.
        """
        if self._context.cursor.at_end and not self._context.cursor.truncated:
            return False
        return self._after_value == self._syntax.after_value.strip() and value.may_contain(closing)


class _Value:
    """Writes a value as JSON: a string as it comes, another value when it is complete.

    Objects and lists are converted as they come, because a long one takes milliseconds.
    """

    __slots__ = ("_container", "_context", "_newline", "_parts", "_syntax", "_types")

    def __init__(self, context: CallContext, types: tuple[str, ...], syntax: ParameterSyntax) -> None:
        self._context = context
        self._syntax = syntax
        self._types = types
        self._newline = ""  # a newline at the end, which belongs to the delimiter if no text follows
        self._parts: TextBuffer | None = None
        self._container = JsonContainerReader()
        if is_text(types, untyped_json=syntax.untyped_json):
            context.sink.arguments('"')
        else:
            self._parts = TextBuffer()

    def put(self, text: str) -> None:
        text = self._newline + self._context.special.decode(text)
        self._newline = ""
        if self._syntax.after_value.startswith("\n") and text.endswith("\n"):
            text, self._newline = text[:-1], "\n"
        if self._parts is None:
            self._context.sink.arguments(escape(text))
        else:
            self._parts.append(text)
            self._container.put(text)

    def may_contain(self, text: str) -> bool:
        """True if the value is a JSON object or list so far, in which text may stand inside of a string."""
        is_json = self._parts is not None and (not self._types or not _CONTAINERS.isdisjoint(self._types))
        return is_json and not self._newline and self._container.is_in_string and _CONTROLS.isdisjoint(text)

    def finish(self) -> None:
        if self._parts is None:
            self._context.sink.arguments('"')
        else:
            value = to_json(
                self._parts.joined(),
                self._types,
                untyped_json=self._syntax.untyped_json,
                as_container=lambda _: self._container.finish(),
            )
            self._context.sink.arguments(value)
