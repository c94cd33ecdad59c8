"""Parses messages in the built-in formats, except harmony."""

from baton.gateway.output.calls.call_context import CallContext, CallReader
from baton.gateway.output.calls.gemma_calls import GemmaCallReader
from baton.gateway.output.calls.json_calls import JsonCallReader
from baton.gateway.output.calls.named_calls import NamedCallReader
from baton.gateway.output.calls.parameter_calls import ParameterCallReader
from baton.gateway.output.formats import (
    CallLayout,
    ContentForm,
    OutputFormat,
    ParserOptions,
    ReasoningFormat,
    ToolFormat,
)
from baton.gateway.output.part_sink import PartSink
from baton.gateway.output.prompt_end import opens_reasoning
from baton.gateway.output.reading_parser import ReadingParser
from baton.gateway.output.special_text import special_text
from baton.gateway.output.stream import DelimiterSearch, Reading
from baton.gateway.output.values.typed_values import ToolTypes

_NO_DELIMITER = DelimiterSearch(())


class FormatParser(ReadingParser):
    """Parser for a reasoning format, a tool format, or both.

    Reasoning may stand anywhere between content and calls. A malformed call is content up to its closing
    delimiter, or up to the next trigger.
    """

    def __init__(self, output_format: OutputFormat, options: ParserOptions) -> None:
        """Create the parser of one sample."""
        tools = output_format.tools if options.parse_tools else None
        reasoning = output_format.reasoning
        special = special_text(_delimiters(tools, reasoning), options.special_tokens)
        super().__init__(special, PartSink(options, short_ids=tools is not None and tools.short_ids))
        self._open = special.delimiter(reasoning.open) if reasoning else ""
        self._form = options.content
        self._triggers = triggers = self._delimiters(tools.triggers if tools else ())
        self._close = special.delimiter(tools.close) if tools else ""
        self._free_text = DelimiterSearch((self._open, *triggers))
        self._malformed = DelimiterSearch((self._close, *triggers))
        self._reasoning_close = special.delimiter(reasoning.close) if reasoning else ""
        call = triggers[:1] if tools is not None and tools.ends_reasoning else ()
        self._reasoning_end_search = DelimiterSearch((self._reasoning_close, *call))
        self._bare = tools is not None and tools.bare
        self._reader: CallReader | None = None
        if tools is not None:
            context = CallContext(self._cursor, self._sink, special, ToolTypes(options.tools), tools)
            self._reader = _reader(context)
        self._begins_in_reasoning = reasoning is not None and opens_reasoning(
            options.prompt, reasoning, options.special_tokens
        )
        self._start()

    def _messages(self) -> Reading[None]:
        if self._begins_in_reasoning:
            yield from self._cursor.space()
            yield from self._cursor.match(self._open)  # models may repeat the delimiter of the prompt
            yield from self._read_reasoning()
        elif self._form.is_whole:
            yield from self._read_first_reasoning()
        if self._form.is_whole and (yield from self._is_content()):
            yield from self._cursor.until(_NO_DELIMITER, self._content)
            return
        if self._bare and not self._form.is_whole:
            yield from self._read_bare_calls()
        while True:
            found = yield from self._cursor.until(self._free_text, self._content)
            if not found:
                return
            if found == self._open:
                yield from self._read_reasoning()
            else:
                yield from self._read_calls(found)

    def _read_first_reasoning(self) -> Reading[None]:
        """Read reasoning if the message begins with it."""
        self._cursor.capture()
        found = yield from self._cursor.match(self._open)
        captured = self._cursor.captured()
        if found:
            yield from self._read_reasoning()
        else:
            self._content(captured)

    def _is_content(self) -> Reading[bool]:
        """Return False if calls follow. White space before them is read, and calls without a trigger, too."""
        self._cursor.capture()
        yield from self._cursor.space()
        is_call = bool((yield from self._cursor.sees(self._triggers)))
        before = self._cursor.captured()
        if is_call:
            self._sink.end_content()
            return False
        self._content(before if self._form is ContentForm.EXACT else before.lstrip())
        return not (self._bare and (yield from self._read_bare_calls()))

    def _read_reasoning(self) -> Reading[None]:
        """Read reasoning up to its end, which may be a call; that is read, too."""
        self._sink.delimiter()
        while True:
            found = yield from self._cursor.until(self._reasoning_end_search, self._reasoning)
            if found in ("", self._reasoning_close) or self._reader is None:
                return
            self._cursor.capture(found)
            if (yield from self._reader.read(found)):
                self._end_calls()
                return
            self._reasoning(self._cursor.captured())

    def _read_bare_calls(self) -> Reading[bool]:
        """Read calls that begin the message without a trigger. Return False if there are none."""
        self._cursor.capture()
        yield from self._cursor.space()
        is_object = yield from self._cursor.sees(("{",))
        if is_object and self._reader is not None and (yield from self._reader.read("")):
            self._end_calls()
            return True
        self._content(self._cursor.captured())
        return False

    def _end_calls(self) -> None:
        """End calls that were read. Further text is content, unless it is the beginning of a delimiter that
        was cut."""
        self._sink.delimiter()
        rest = self._cursor.captured()
        if not self._cursor.is_cut:
            self._content(rest)

    def _read_calls(self, trigger: str) -> Reading[None]:
        """Read calls after a trigger. Malformed ones become content."""
        while trigger and self._reader is not None:
            self._cursor.capture(trigger)
            if (yield from self._reader.read(trigger)):
                self._end_calls()
                return
            self._content(self._cursor.captured())
            trigger = yield from self._cursor.until(self._malformed, self._content)
            if trigger == self._close:
                self._content(trigger)
                return


def _delimiters(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> tuple[str, ...]:
    """Return all texts of a format in which special tokens may occur."""
    texts = [reasoning.open, reasoning.close] if reasoning else []
    if tools is not None:
        syntax = tools.syntax
        texts += [*tools.triggers, tools.close, tools.id_delimiter, syntax.section_begin, syntax.section_end]
        texts += [syntax.before_name, syntax.after_name, syntax.after_arguments, syntax.string_delimiter]
        if (parameters := syntax.parameters) is not None:
            texts += [parameters.before_key, parameters.after_key, parameters.after_value, parameters.after_string_key]
    return tuple(texts)


def _reader(context: CallContext) -> CallReader:
    tools = context.tools
    if tools.layout is CallLayout.NAME_AND_JSON:
        return NamedCallReader(context)
    if tools.layout is CallLayout.PARAMETERS and tools.syntax.parameters is not None:
        return ParameterCallReader(context, tools.syntax.parameters)
    if tools.layout is CallLayout.GEMMA:
        return GemmaCallReader(context)
    return JsonCallReader(context)
