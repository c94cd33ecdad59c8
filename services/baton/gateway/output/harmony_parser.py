"""Parses the harmony format of gpt-oss: messages with a header, which names a channel and a recipient.

A message is `<|start|>` HEADER `<|message|>` BODY and `<|end|>`, `<|call|>` or `<|return|>`. The prompt ends
inside of the first header. The channel `analysis` is reasoning. A message to `functions.NAME` is a call. All
others are content.
"""

import re

from baton.core.client_api import MessagePart
from baton.core.request import FinishReason
from baton.gateway.output.calls.call_context import is_name
from baton.gateway.output.calls.json_text import JsonReader
from baton.gateway.output.formats import MessageParser, ParserOptions, Piece
from baton.gateway.output.part_sink import PartSink
from baton.gateway.output.special_text import special_text, split_special
from baton.gateway.output.stream import Cursor, DelimiterSearch, Emit, Reading

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
MAX_HEADER = 512
MAX_PREFILL = 64 * 1024
_FUNCTIONS = "functions."
_ANALYSIS, _CONTENT = "analysis", "content"
_ROLE = re.compile(r"\s*\w*\s*")
_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")


class HarmonyParser(MessageParser):
    """Parser for harmony messages.

    Text outside of messages is content. So is a message to `functions.` that is no JSON object, with its
    header. Messages to the built-in tools `python` and `browser` are reasoning, as in the reference
    implementation's servers.
    """

    def __init__(self, options: ParserOptions) -> None:
        """Create the parser of one sample."""
        self._special = special_text(TOKENS, options.special_tokens)
        self._sink = PartSink(options.call_id_seed)
        self._parse_tools = options.parse_tools
        self._tools = options.tools
        self._in_reasoning = False
        self._cursor = Cursor()
        start, channel, _, message, *ends = (self._special.delimiter(token) for token in TOKENS)
        self._start, self._channel, self._message_token, self._ends = start, channel, message, tuple(ends)
        self._channel_name = re.compile(re.escape(channel) + r"\s*(\w+)")
        self._begin = DelimiterSearch((start, channel))
        self._header_end = DelimiterSearch((start, message, *ends))
        self._body_end = DelimiterSearch((start, channel, *ends))
        self._json = JsonReader(self._cursor, self._special)
        self._prompt = ""  # the beginning of the first message, which the model did not write
        self._kinds: set[str] = set()
        self._reading = self._messages()
        self._read_prompt(options.prompt)

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    @property
    def in_reasoning(self) -> bool:
        return self._in_reasoning

    def put(self, piece: Piece) -> tuple[MessagePart, ...]:
        text = self._special.encode(piece)
        if not text:
            return ()
        self._cursor.put(text)
        next(self._reading)
        return self._sink.take()

    def finish(self, reason: FinishReason) -> tuple[MessagePart, ...]:
        self._cursor.final = True
        self._cursor.truncated = reason is FinishReason.LENGTH
        for _ in self._reading:  # does not yield any more
            pass
        return self._sink.finish()

    def _read_prompt(self, prompt: str) -> None:
        """Read the message that the prompt begins, without its text."""
        _, found, header = prompt.rpartition(START)
        known = tuple(token for token in TOKENS if self._special.delimiter(token) != token)
        if found and len(header) <= MAX_PREFILL:
            self._prompt = "".join(map(self._special.encode, split_special(found + header, known)))
            self._cursor.put(self._prompt)
        next(self._reading)
        self._sink.drop_text()

    def _messages(self) -> Reading[None]:
        while True:
            begin = yield from self._cursor.until(self._begin, self._content)
            while begin in (self._start, self._channel):
                begin = yield from self._message(begin)
            if self._cursor.at_end:
                return

    def _message(self, begin: str) -> Reading[str]:
        """Read a message after the delimiter that begins it. Return the delimiter that ends it."""
        self._cursor.capture(begin)
        header = yield from self._header()
        if header is None:
            header = self._raw()
            if not self._cursor.at_end and not _ROLE.fullmatch(header.removeprefix(self._start)):
                self._content(header)
            return ""
        channel = self._channel_name.search(begin + header)
        recipient = _RECIPIENT.search(begin + header)
        if recipient is not None:
            name = recipient.group(1).removeprefix(_FUNCTIONS)
            if recipient.group(1) != name or name in self._tools:
                return (yield from self._call(name))
        self._cursor.captured()
        if recipient is not None or (channel is not None and channel.group(1) == _ANALYSIS):
            self._in_reasoning = True
            end = yield from self._body(self._reasoning, _ANALYSIS)
            self._in_reasoning = False
            return end
        return (yield from self._body(self._content, _CONTENT))

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

    def _body(self, emit: Emit, kind: str) -> Reading[str]:
        """Read a body that is no call. Bodies of the same kind are separated by a newline."""
        self._sink.delimiter()
        if kind in self._kinds:
            emit("\n")
        self._kinds.add(kind)
        return (yield from self._cursor.until(self._body_end, emit))

    def _call(self, name: str) -> Reading[str]:
        """Read the body of a call. The header was captured."""
        cursor, sink = self._cursor, self._sink
        yield from cursor.space()
        is_object = yield from cursor.sees(("{",))
        is_empty = bool((yield from cursor.sees(self._ends))) or (cursor.at_end and not cursor.truncated)
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
            return (yield from cursor.until(self._body_end, self._arguments))
        sink.delimiter()
        return (yield from cursor.until(self._body_end, self._content))

    def _raw(self) -> str:
        """End the capture and return the model's text without that of the prompt."""
        raw = self._cursor.captured().removeprefix(self._prompt)
        self._prompt = ""
        return raw

    def _content(self, text: str) -> None:
        self._sink.content(self._special.decode(text))

    def _reasoning(self, text: str) -> None:
        self._sink.reasoning(self._special.decode(text))

    def _arguments(self, text: str) -> None:
        self._sink.arguments(self._special.decode(text))
