"""Reads calls that are a name, a delimiter and a JSON object."""

import re

from baton.gateway.output.calls.call_context import CallContext, is_name, read_name
from baton.gateway.output.calls.json_calls import JsonCallReader
from baton.gateway.output.calls.json_text import JsonReader
from baton.gateway.output.stream import DelimiterSearch, Reading


class NamedCallReader:
    """Implements `CallReader` for the layout NAME_AND_JSON.

    Where JSON stands in place of the first name, it is read like the layout JSON_OBJECT: Mistral's older
    models write a list of objects after the same trigger.
    """

    __slots__ = (
        "_after_arguments",
        "_after_name",
        "_before_name",
        "_context",
        "_end",
        "_id",
        "_json",
        "_json_calls",
        "_openings",
        "_section_end",
    )

    def __init__(self, context: CallContext) -> None:
        self._context = context
        tools, syntax = context.tools, context.tools.syntax
        self._json = JsonReader(context.cursor, context.special)
        self._json_calls = JsonCallReader(context)
        self._openings = context.openings()
        self._before_name = context.delimiters(syntax.before_name)
        self._after_name = context.delimiters(syntax.after_name)
        self._after_arguments = context.delimiters(syntax.after_arguments)
        self._section_end = context.special.delimiter(syntax.section_end)
        self._id = context.special.delimiter(tools.id_delimiter)
        self._end = DelimiterSearch((*self._after_arguments[-1:], self._section_end, *self._before_name[:1]))

    def read(self, trigger: str) -> Reading[bool]:
        """Read the calls of a section, or one call if the format has no sections."""
        cursor = self._context.cursor
        yield from cursor.space()
        if (yield from cursor.sees(("[{", "{", "[ ", "[\n"))):
            return (yield from self._json_calls.read(trigger))
        opening = self._openings[trigger]
        while (yield from self._context.expect(opening)):
            if not (yield from self._call()):
                return False
            if cursor.at_end:
                return True
            cursor.capture()
            yield from cursor.space()
            if self._section_end and (yield from cursor.match(self._section_end)):
                cursor.captured()
                return True
            if not self._section_end or not (yield from cursor.sees(self._before_name[:1])):
                return True
            opening = self._before_name
        return False

    def _call(self) -> Reading[bool]:
        """Read a call from its name on. Return False if it is malformed and was not announced."""
        context, cursor = self._context, self._context.cursor
        yield from cursor.space()
        name = yield from read_name(cursor)
        if not is_name(name):
            return False
        call_id = ""
        if context.tools.id_prefix:
            call_id, name = name, _name_in(name, context.tools.id_prefix)
            if not name:
                return False
        yield from cursor.space()
        if self._id and (yield from cursor.match(self._id)):
            call_id = yield from read_name(cursor)
            yield from cursor.space()
        if not (yield from cursor.sees(("{",))) and not (yield from context.expect(self._after_name)):
            return False
        yield from cursor.space()
        if not (yield from cursor.sees(("{",))):
            return False
        context.announce(name, call_id)
        is_json = yield from self._json.value(context.sink.arguments)
        if not is_json:
            yield from context.rest_of_arguments(self._end)
        context.sink.end_call()
        if is_json:
            yield from self._end_of_call()
        return True

    def _end_of_call(self) -> Reading[None]:
        """Read the delimiters after the arguments. Missing ones are accepted."""
        yield from self._context.accept(self._after_arguments)


def _name_in(call_id: str, prefix: str) -> str:
    """Return the name of the tool in an id such as `functions.get_weather:0`; the id itself if it is only a
    name."""
    found = re.fullmatch(r"(.*):[0-9]+", call_id.removeprefix(prefix))
    return found.group(1) if found else call_id
