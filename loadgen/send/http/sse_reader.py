"""Parses server-sent events from arbitrarily split chunks of bytes (WHATWG HTML, section 9.2).

It keeps an event's name and data. As the standard says, it drops comments, `id`, `retry`, unknown fields and
a block that does not end with an empty line. Memory is bounded: a line or an event above the limit raises.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 32 * 1024 * 1024
"""Servers that return token ids send the prompt's ids in the first event; a million ids take 8 MB."""
_BOM = b"\xef\xbb\xbf"


class EventTooLong(Exception):
    """A line or an event is longer than the limit."""


class SseParser:
    """Parser of one stream. Events are returned as (name, data); the name is `b""` if none was given."""

    __slots__ = ("_cut", "_cut_bytes", "_data", "_data_bytes", "_ends_with_cr", "_is_first", "_max_bytes", "_name")

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._cut: list[bytes] = []  # parts of an unfinished line
        self._cut_bytes = 0
        self._data: list[bytes] = []  # data lines of an unfinished event
        self._data_bytes = 0
        self._name = b""
        self._ends_with_cr = False
        self._is_first = True

    @property
    def has_partial_event(self) -> bool:
        """True if an unfinished event is buffered. At the end of a stream it means that the stream was
        cut."""
        return bool(self._cut_bytes or self._data)

    def feed(self, chunk: bytes) -> list[tuple[bytes, bytes]]:
        """Return the events completed by `chunk`, in order. Raises EventTooLong."""
        if self._ends_with_cr or b"\r" in chunk:
            chunk = self._with_newlines(chunk)
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if not lines:
            self._keep(rest)
            return []
        if self._cut:
            self._cut.append(lines[0])
            lines[0] = b"".join(self._cut)
            self._cut, self._cut_bytes = [], 0
            if len(lines[0]) > self._max_bytes:
                raise EventTooLong(self._message)
        if self._is_first:
            self._is_first = False
            lines[0] = lines[0].removeprefix(_BOM)
        events = self._events(lines)
        self._keep(rest)
        return events

    def _events(self, lines: list[bytes]) -> list[tuple[bytes, bytes]]:
        events = []
        data = self._data
        for line in lines:
            if line[:6] == b"data: ":
                data.append(line[6:])
            elif not line:
                if data:
                    events.append((self._name, data[0] if len(data) == 1 else b"\n".join(data)))
                    data = self._data = []
                    self._data_bytes = 0
                self._name = b""
                continue
            else:
                self._field(line)
                if line[:4] != b"data":
                    continue
            self._data_bytes += len(line)
            if self._data_bytes > self._max_bytes:
                raise EventTooLong(self._message)
        return events

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value

    def _keep(self, rest: bytes) -> None:
        if rest:
            self._cut.append(rest)
            self._cut_bytes += len(rest)
            if self._cut_bytes > self._max_bytes:
                raise EventTooLong(self._message)

    def _with_newlines(self, chunk: bytes) -> bytes:
        """Convert `\\r\\n` and `\\r` to `\\n`. If a `\\r\\n` pair is split over two chunks, the second half
        is dropped."""
        if self._ends_with_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
            self._ends_with_cr = False
        if chunk:
            self._ends_with_cr = chunk[-1:] == b"\r"
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    @property
    def _message(self) -> str:
        return f"an event is longer than {self._max_bytes} bytes"
