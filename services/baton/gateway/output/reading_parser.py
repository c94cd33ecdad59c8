"""Common part of the parsers that read their text with a cursor."""

from abc import abstractmethod
from collections.abc import Iterable

from baton.core.client_api import MessagePart
from baton.core.request import FinishReason
from baton.gateway.output.formats import MessageParser, Piece, ReadProgress
from baton.gateway.output.part_sink import PartSink
from baton.gateway.output.special_text import SpecialText
from baton.gateway.output.stream import Cursor, Reading


class ReadingParser(MessageParser):
    """Parser whose `_messages` reads the text from top to bottom. Call `_start` when it is ready."""

    def __init__(self, special: SpecialText, sink: PartSink) -> None:
        self._special = special
        self._sink = sink
        self._cursor = Cursor()
        self._reasoning_begin = self._reasoning_end = 0
        self._reading: Reading[None] = self._messages()

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    @property
    def is_complete(self) -> bool:
        return self._sink.is_complete

    @property
    def progress(self) -> ReadProgress:
        cursor = self._cursor
        return ReadProgress(cursor.num_put, cursor.num_read, self._reasoning_begin, self._reasoning_end)

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

    def close(self) -> None:
        self._reading.close()  # its frame is in a cycle with this object

    @abstractmethod
    def _messages(self) -> Reading[None]:
        """Read all of the text. Parts go to the sink."""

    def _start(self) -> None:
        """Begin to read."""
        next(self._reading)

    def _delimiters(self, texts: Iterable[str]) -> tuple[str, ...]:
        """Return delimiters as they appear in the text."""
        return tuple(map(self._special.delimiter, texts))

    def _content(self, text: str) -> None:
        self._sink.content(self._special.decode(text))

    def _reasoning(self, text: str) -> None:
        """Add text that was just read to the reasoning."""
        end = self._cursor.num_read
        begin = end - len(text)
        if begin != self._reasoning_end:
            self._reasoning_begin = begin
        self._reasoning_end = end
        self._sink.reasoning(self._special.decode(text))

    def _arguments(self, text: str) -> None:
        self._sink.arguments(self._special.decode(text))
