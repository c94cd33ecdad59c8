"""Reads Gemma's calls: a name and an object like JSON, with bare keys and strings between special tokens."""

from baton.gateway.output.calls.call_context import CallContext, is_name, read_name
from baton.gateway.output.calls.json_text import JsonReader
from baton.gateway.output.stream import DelimiterSearch, Reading


class GemmaCallReader:
    """Implements `CallReader` for the layout GEMMA."""

    __slots__ = ("_close", "_context", "_end", "_object", "_openings")

    def __init__(self, context: CallContext) -> None:
        self._context = context
        syntax = context.tools.syntax
        self._object = JsonReader(context.cursor, context.special, syntax.string_delimiter)
        self._openings = context.openings()
        self._close = context.special.delimiter(context.tools.close)
        self._end = DelimiterSearch((self._close,))

    def read(self, trigger: str) -> Reading[bool]:
        """Read one call and its closing delimiter."""
        context, cursor = self._context, self._context.cursor
        if not (yield from context.expect(self._openings[trigger])):
            return False
        name = yield from read_name(cursor)
        if not is_name(name):
            return False
        yield from cursor.space()
        if not (yield from cursor.sees(("{",))):
            return False
        context.announce(name)
        if not (yield from self._object.value(context.sink.arguments)):
            yield from context.rest_of_arguments(self._end)
            context.sink.end_call()
            return True
        context.sink.end_call()
        cursor.capture()
        yield from cursor.space()
        if (yield from cursor.match(self._close)):
            cursor.captured()
        return True
