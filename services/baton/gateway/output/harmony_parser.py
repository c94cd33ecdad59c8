"""Parses the harmony format of gpt-oss: messages with a header, which names a channel and a recipient.

A message is `<|start|>` HEADER `<|message|>` BODY and `<|end|>`, `<|call|>` or `<|return|>`. The prompt ends
inside of the first header. The channel `analysis` is reasoning. A message to `functions.NAME` is a call. All
others are content.
"""

import re

from baton.gateway.output.calls.call_context import is_name
from baton.gateway.output.calls.json_text import JsonReader
from baton.gateway.output.formats import ParserOptions
from baton.gateway.output.part_sink import PartSink
from baton.gateway.output.reading_parser import ReadingParser
from baton.gateway.output.special_text import special_text, split_special
from baton.gateway.output.stream import DelimiterSearch, Reading

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
MAX_HEADER = 512
MAX_PREFILL = 64 * 1024
_FUNCTIONS = "functions."
_ANALYSIS = "analysis"
_ROLE = re.compile(r"\s*\w*\s*")
_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")


class HarmonyParser(ReadingParser):
    """Parser for harmony messages.

    Text outside of messages is content. A message to `functions.` that is no JSON object is content, too,
    with its header. Messages to the built-in tools `python` and `browser` are reasoning, as in the servers of
    the reference implementation.
    """

    def __init__(self, options: ParserOptions) -> None:
        """Create the parser of one sample."""
        super().__init__(special_text(TOKENS, options.special_tokens), PartSink(options))
        self._parse_tools = options.parse_tools
        self._tools = options.tools
        start, channel, _, message, *ends = self._delimiters(TOKENS)
        self._start_token, self._channel, self._message_token, self._ends = start, channel, message, tuple(ends)
        self._channel_name = re.compile(re.escape(channel) + r"\s*(\w+)")
        self._begin = DelimiterSearch((start, channel))
        self._header_end = DelimiterSearch((start, message, *ends))
        self._body_end = DelimiterSearch((start, channel, *ends))
        self._json = JsonReader(self._cursor, self._special)
        self._prompt = ""  # the beginning of the first message, which the model did not write
        self._has_reasoning = self._has_content = False
        self._read_prompt(options.prompt)

    def _read_prompt(self, prompt: str) -> None:
        """Read the message that the prompt begins, without its text."""
        _, found, header = prompt.rpartition(START)
        known = tuple(token for token in TOKENS if self._special.delimiter(token) != token)
        if found and len(header) <= MAX_PREFILL:
            self._prompt = "".join(map(self._special.encode, split_special(found + header, known)))
            self._cursor.put(self._prompt)
        self._start()
        self._sink.drop_text()

    def _messages(self) -> Reading[None]:
        while True:
            begin = yield from self._cursor.until(self._begin, self._content)
            while begin in (self._start_token, self._channel):
                begin = yield from self._message(begin)
            if self._cursor.at_end:
                return

    def _message(self, begin: str) -> Reading[str]:
        """Read a message after the delimiter that begins it. Return the delimiter that ends it."""
        self._cursor.capture(begin)
        header = yield from self._header()
        if header is None:
            header = self._raw()
            if not self._cursor.at_end and not _ROLE.fullmatch(header.removeprefix(self._start_token)):
                self._content(header)
            return ""
        channel = self._channel_name.search(begin + header)
        recipient = _RECIPIENT.search(begin + header)
        if recipient is not None:
            name = recipient.group(1).removeprefix(_FUNCTIONS)
            if recipient.group(1) != name or name in self._tools:
                return (yield from self._call(name))
        self._cursor.captured()
        self._sink.delimiter()  # bodies of the same kind are separated by a newline
        if recipient is not None or (channel is not None and channel.group(1) == _ANALYSIS):
            self._sink.reasoning("\n" * self._has_reasoning)
            self._has_reasoning = True
            return (yield from self._cursor.until(self._body_end, self._reasoning))
        self._sink.content("\n" * self._has_content)
        self._has_content = True
        return (yield from self._cursor.until(self._body_end, self._content))

    def _header(self) -> Reading[str | None]:
        """Read the header and the delimiter after it. Return None if it is malformed."""
        cursor = self._cursor
        while True:
            begin, end = self._header_end.find(cursor.text, cursor.pos, cursor.final)
            if begin - cursor.pos > MAX_HEADER or (begin == end and cursor.final):
                cursor.take(begin)
                return None
            if end > begin:
                break
            yield
        header = cursor.take(begin)
        if not (yield from cursor.match(self._message_token)):
            return None
        return header

    def _call(self, name: str) -> Reading[str]:
        """Read the body of a call. The header was captured."""
        cursor, sink = self._cursor, self._sink
        yield from cursor.space()
        is_object = yield from cursor.sees(("{",))
        is_empty = bool((yield from cursor.sees(self._ends))) or (cursor.at_end and not cursor.is_cut)
        if not self._parse_tools or not is_name(name) or not (is_object or is_empty):
            self._content(self._raw())
            end = yield from cursor.until(self._body_end, self._content)
            if end in self._ends:
                self._content(end)
            return end
        cursor.captured()
        sink.call(name)
        if is_empty:
            sink.arguments("{}")
        elif not (yield from self._json.value(sink.arguments)):
            end = yield from cursor.until(self._body_end, self._arguments, in_call=True)
            sink.end_call()
            return end
        sink.end_call()
        sink.delimiter()
        return (yield from cursor.until(self._body_end, self._content))

    def _raw(self) -> str:
        """End the capture and return the model's text without that of the prompt."""
        raw = self._cursor.captured().removeprefix(self._prompt)
        self._prompt = ""
        return raw
