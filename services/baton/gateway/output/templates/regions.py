"""Turns the text of a response template's regions into parts of a message."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from baton.core.client_api import PartKind
from baton.gateway.output.calls.call_context import CallContext, is_name
from baton.gateway.output.calls.json_calls import JsonCallReader
from baton.gateway.output.calls.json_text import JsonReader
from baton.gateway.output.formats import CallLayout, CallSyntax, ContentForm, ParserOptions, ToolFormat
from baton.gateway.output.part_sink import PartSink, Trimmer
from baton.gateway.output.special_text import SpecialText
from baton.gateway.output.stream import Cursor, Reading
from baton.gateway.output.templates.content_parsers import TagParser, parse_content, transformed
from baton.gateway.output.templates.response_template import FieldTemplate
from baton.gateway.output.text_buffer import TextBuffer
from baton.gateway.output.values.typed_values import ToolTypes, to_json

_KINDS = {
    "content": PartKind.CONTENT,
    "reasoning_content": PartKind.REASONING,
    "reasoning": PartKind.REASONING,
    "thinking": PartKind.REASONING,
}
_CALLS = "tool_calls"
_JSON_CALLS = ToolFormat(
    name="response_template",
    layout=CallLayout.JSON_OBJECT,
    triggers=(),
    close="",
    syntax=CallSyntax(before_name="", after_name="", after_arguments=""),
)


class Region(Protocol):
    """Takes the text of a region, encoded by `SpecialText`."""

    def put(self, text: str) -> None:
        """Add text."""
        ...

    def close(self, delimiter: str) -> None:
        """End the region. `delimiter` is empty at the end of the text."""
        ...

    def drop(self) -> None:
        """Drop the region and what it holds."""
        return


class _Ignored(Region):
    """A region that no part of a message represents."""

    def put(self, text: str) -> None:
        """Do nothing."""

    def close(self, delimiter: str) -> None:
        """Do nothing."""


class _Text(Region):
    """A region of content or reasoning."""

    def __init__(self, sink: PartSink, special: SpecialText, kind: PartKind, trimmer: Trimmer | None) -> None:
        self._sink = sink
        self._special = special
        self._kind = kind
        self._trimmer = trimmer

    def put(self, text: str) -> None:
        text = self._special.decode(text)
        self._sink.text(self._kind, self._trimmer.put(text) if self._trimmer is not None else text)

    def close(self, delimiter: str) -> None:
        if self._trimmer is not None:
            self._trimmer.delimiter()


class _Unparsed(Region):
    """A region that is content, with its delimiters."""

    def __init__(self, content: Region, opening: str) -> None:
        self._content = content
        self.put(opening)

    def put(self, text: str) -> None:
        self._content.put(text)

    def close(self, delimiter: str) -> None:
        self.put(delimiter)


class _Buffered(Region):
    """A region that is parsed when it is complete. If that fails it is content, as it was written."""

    def __init__(self, regions: "Regions", field: FieldTemplate, opening: str, captures: Mapping[str, str]) -> None:
        self._regions = regions
        self._field = field
        self._opening = opening
        self._captures = captures
        self._texts = TextBuffer()
        self._tags = TagParser(field.content_args) if field.content == "xml-inline" else None

    def put(self, text: str) -> None:
        self._texts.append(text)
        if self._tags is not None:
            self._tags.put(self._regions.special.decode(text))

    def close(self, delimiter: str) -> None:
        body = self._texts.joined()
        try:
            if self._regions.is_cut:
                raise ValueError("the region is not complete")
            self._regions.put_value(self._field, self._value(self._regions.special.decode(body)))
        except (ValueError, KeyError, TypeError, RecursionError):
            self._regions.content.put(self._opening + body + delimiter)

    def _value(self, body: str) -> Any:
        field = self._field
        value = self._tags.finish() if self._tags else parse_content(body, field.content, field.content_args)
        if field.transform is None:
            return value
        if not field.transform_each:
            return transformed(field.transform, {**self._captures, "content": value})
        if not isinstance(value, list):
            raise ValueError("not a list")
        return [transformed(field.transform, {**self._captures, **item}) for item in value]


class _StreamedCall(Region):
    """A tool call whose arguments are JSON, which are passed on as they come."""

    def __init__(self, regions: "Regions", field: FieldTemplate, opening: str, name: str) -> None:
        self._regions = regions
        self._cursor = Cursor()
        self._context = CallContext(self._cursor, regions.sink, regions.special, regions.types, _JSON_CALLS)
        self._cursor.capture(opening)
        delimiters = field.content_args.get("string_delims") or [["", ""]]
        self._arguments = JsonReader(self._cursor, regions.special, delimiters[0][0])
        self._reading = self._named(name) if name else self._object()
        self._is_reading = True
        self._advance()

    def put(self, text: str) -> None:
        if self._is_reading:
            self._cursor.put(text)
            self._advance()
        else:
            self._put_rest(text)

    def close(self, delimiter: str) -> None:
        self._cursor.final = True
        self._cursor.truncated = self._regions.is_cut
        if self._is_reading:
            self._advance()
        if self._is_malformed:
            self._regions.content.put(delimiter)

    def drop(self) -> None:
        self._reading.close()  # its frame is in a cycle with this object

    def _advance(self) -> None:
        try:
            next(self._reading)
        except StopIteration as stop:
            self._is_reading = False
            self._is_malformed = not stop.value
            self._put_rest(self._cursor.captured())
            self._put_rest(self._cursor.take(len(self._cursor.text)))

    def _put_rest(self, text: str) -> None:
        """Pass on text that does not belong to the call, unless it is the beginning of a delimiter that was
        cut."""
        if self._is_malformed or not self._regions.is_cut:
            self._regions.content.put(text)

    def _object(self) -> Reading[bool]:
        """Read calls that are JSON objects with a name and arguments."""
        return (yield from JsonCallReader(self._context).read("region"))

    def _named(self, name: str) -> Reading[bool]:
        """Read the arguments of the call of this name."""
        yield from self._cursor.space()
        if not is_name(name) or not (yield from self._cursor.sees(("{",))):
            return False
        self._context.announce(name)
        if not (yield from self._arguments.value(self._regions.sink.arguments)):
            while (yield from self._cursor.more()):
                self._context.arguments(self._cursor.take(len(self._cursor.text)))
        self._regions.sink.end_call()
        yield from self._cursor.space()
        return True


class Regions:
    """Creates the regions of one message."""

    def __init__(self, sink: PartSink, special: SpecialText, options: ParserOptions) -> None:
        self.sink = sink
        self.special = special
        self.types = ToolTypes(options.tools)
        self.is_cut = False
        """True if a limit of tokens cut the text in the region that is open."""
        self._parse_tools = options.parse_tools
        self._form = options.content
        self._trimmers = {kind: self._trimmer(kind) for kind in _KINDS.values()}
        self.joined: set[str] = set()
        self.content: Region = _Text(sink, special, PartKind.CONTENT, self._trimmers[PartKind.CONTENT])

    def region(self, field: FieldTemplate, opening: str, captures: Mapping[str, str]) -> Region:
        """Return the region of a field after its opening delimiter."""
        kind = _KINDS.get(field.name)
        if kind is not None and field.content == "text" and field.transform is None:
            return self._text(field, kind)
        if field.name == _CALLS:
            name = _streamed_name(field, captures)
            if not self._parse_tools:
                return _Unparsed(self.content, opening)
            if name is not None:
                return _StreamedCall(self, field, opening, name)
        elif kind is None:
            return _Ignored()
        return _Buffered(self, field, opening, captures)

    def is_content(self, field: FieldTemplate | None) -> bool:
        """Return True if the text of a field is content."""
        return field is not None and _KINDS.get(field.name) is PartKind.CONTENT

    def is_reasoning(self, field: FieldTemplate | None) -> bool:
        """Return True if the text of a field is reasoning."""
        return field is not None and _KINDS.get(field.name) is PartKind.REASONING

    def put_value(self, field: FieldTemplate, value: Any) -> None:
        """Add the value of a complete region. Raises ValueError if it is not what the field needs."""
        kind = _KINDS.get(field.name)
        if kind is not None:
            self.sink.text(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            return
        calls = [self._call(item) for item in (value if isinstance(value, list) else [value])]
        for name, call_id, arguments in calls:
            self.sink.call(name, call_id)
            self.sink.arguments(arguments)
            self.sink.end_call()

    def _text(self, field: FieldTemplate, kind: PartKind) -> Region:
        strip = bool(field.content_args.get("strip", True))
        if field.join is None:
            return _Text(self.sink, self.special, kind, self._trimmers[kind] if strip else None)
        if field.name in self.joined:
            self.sink.text(kind, field.join)
        self.joined.add(field.name)
        return _Text(self.sink, self.special, kind, self._trimmer(kind) if strip else None)

    def _trimmer(self, kind: PartKind) -> Trimmer | None:
        """Return a new trimmer for text of this kind; None if the text is passed on as it is."""
        if kind is PartKind.CONTENT and self._form in (ContentForm.TAGGED, ContentForm.EXACT):
            return None
        return Trimmer(strip=True, keeps_end=kind is PartKind.CONTENT and self._form is ContentForm.SPACED)

    def _call(self, value: Any) -> tuple[str, str, str]:
        """Return the name, the id and the arguments of a call."""
        function = value["function"]
        name, arguments = function["name"], function.get("arguments", {})
        if not isinstance(name, str) or not is_name(name):
            raise ValueError("not a name")
        if isinstance(arguments, dict):
            arguments = {key: self._typed(name, key, argument) for key, argument in arguments.items()}
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not isinstance(arguments, str):
            raise ValueError("not arguments")
        call_id = value.get("id")
        return name, call_id if isinstance(call_id, str) else "", arguments

    def _typed(self, tool: str, key: str, argument: Any) -> Any:
        """Convert a string to the type that the tool's schema names."""
        types = self.types.of(tool, key)
        if isinstance(argument, str) and types:
            return json.loads(to_json(argument, types))
        if isinstance(argument, list) and types and "array" not in types:
            return [json.loads(to_json(item, types)) if isinstance(item, str) else item for item in argument]
        return argument


def _streamed_name(field: FieldTemplate, captures: Mapping[str, str]) -> str | None:
    """Return the name of a call with JSON to stream, empty if the JSON has the name; otherwise None."""
    if field.content != "json" or field.transform_each or not isinstance(field.transform, Mapping):
        return None
    function, args = field.transform.get("function"), dict(field.content_args)
    delimiters = args.pop("string_delims", [])
    if function == "{content}" and not args and not delimiters:
        return ""
    is_dialect = len(delimiters) == 1 and delimiters[0][0] == delimiters[0][1]
    args.pop("unquoted_keys", None) if is_dialect else None
    if function != {"name": "{name}", "arguments": "{content}"} or args or (delimiters and not is_dialect):
        return None
    return captures.get("name") or None
