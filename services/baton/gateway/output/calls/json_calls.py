"""Reads calls that are JSON objects with a name and arguments, alone or in a list."""

from baton.gateway.output.calls.call_context import CallContext, is_name
from baton.gateway.output.calls.json_text import JsonReader, read_short_string, read_string
from baton.gateway.output.stream import DelimiterSearch, Emit, Reading
from baton.gateway.output.text_buffer import TextBuffer
from baton.gateway.output.values.json_escape import to_text

_ARGUMENTS = ("arguments", "parameters")
_BARE_KEYS = ("name", "type", "id", *_ARGUMENTS)


class JsonCallReader:
    """Implements `CallReader` for the layout JSON_OBJECT.

    Keys may come in any order. Arguments that come before the name are held back. Arguments in a string are
    taken out of it.
    """

    __slots__ = ("_close", "_context", "_end", "_json")

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._json = JsonReader(context.cursor, context.special)
        tools = context.tools
        self._close = context.special.delimiter(tools.close)
        ends = (tools.close,) if tools.close else tools.triggers
        self._end = DelimiterSearch(map(context.special.delimiter, ends))

    def read(self, trigger: str) -> Reading[bool]:
        """Read a JSON object, several of them, or a list of them, up to the closing delimiter."""
        cursor = self._context.cursor
        yield from cursor.space()
        in_list = bool((yield from cursor.match("[")))
        while True:
            yield from cursor.space()
            if not (yield from self._call(bare=not trigger)):
                return False
            self._context.sink.end_call()
            if cursor.at_end:
                return True
            cursor.capture()
            yield from cursor.space()
            if in_list and (yield from cursor.match("]")):
                in_list = False
                yield from cursor.space()
                if not self._close:
                    cursor.captured()
                    return True
            if self._close:
                while (yield from cursor.match("}")):  # models write too many of them
                    yield from cursor.space()
                if (yield from cursor.match(self._close)):
                    cursor.captured()
                    return True
            if (yield from cursor.match(",", ";")):
                yield from cursor.space()
            if not (yield from cursor.sees(("{",))):
                return True

    def _call(self, *, bare: bool) -> Reading[bool]:
        """Read one object. Return False if it is malformed and the call was not announced."""
        cursor, sink = self._context.cursor, self._context.sink
        if not (yield from cursor.match("{")):
            return False
        name = call_id = ""
        early = TextBuffer()  # arguments that came before the name
        has_arguments = is_announced = False
        while not (yield from cursor.match("}")):
            yield from cursor.space()
            key = yield from read_short_string(cursor)
            yield from cursor.space()
            if key is None or not (yield from cursor.match(":")) or (bare and not name and key not in _BARE_KEYS):
                return is_announced
            yield from cursor.space()
            if key == "name" and not name:
                name = (yield from read_short_string(cursor)) or ""
                if not is_name(name) or (bare and self._context.types and name not in self._context.types):
                    return False
            elif key == "id" and not is_announced and (yield from cursor.sees(('"',))):
                call_id = (yield from read_short_string(cursor)) or ""
            elif key in _ARGUMENTS and not has_arguments:
                has_arguments = True
                if not name:
                    if not (yield from self._arguments(early.append)):
                        return False
                elif not (yield from self._starts_arguments()):
                    return False
                else:
                    self._context.announce(name, call_id)
                    is_announced = True
                    if not (yield from self._arguments(sink.arguments)):
                        yield from self._context.rest_of_arguments(self._end)
                        return True
            elif not (yield from self._json.value(_ignore)):
                return is_announced
            yield from cursor.space()
            if not (yield from cursor.match(",")) and not (yield from cursor.sees(("}",))):
                return is_announced
            yield from cursor.space()
        if not name or (bare and not has_arguments):
            return False
        if not is_announced:
            self._context.announce(name, call_id)
            sink.arguments(early.joined() or "{}")
        return True

    def _starts_arguments(self) -> Reading[str]:
        return (yield from self._context.cursor.sees(("{", '"', "null")))

    def _arguments(self, emit: Emit) -> Reading[bool]:
        """Read the arguments: an object, a string that contains one, or null for none."""
        cursor = self._context.cursor
        start = yield from self._starts_arguments()
        if start == "{":
            return (yield from self._json.value(emit))
        if start == "null":
            emit("{}")
            return bool((yield from cursor.match("null")))
        return bool(start) and (yield from self._arguments_in_string(emit))

    def _arguments_in_string(self, emit: Emit) -> Reading[bool]:
        buffer = TextBuffer()
        ended = yield from read_string(self._context.cursor, self._context.special, buffer.append)
        text = buffer.joined()
        emit((to_text(text) or "{}") if ended else text)
        return ended


def _ignore(_text: str) -> None:
    pass
