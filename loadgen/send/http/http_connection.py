"""One HTTP/1.1 connection: a request goes out, and its streamed answer comes back as facts of an `Exchange`.

A bare asyncio.Protocol over httptools, not a client library, for what a library hides. A request goes into
the kernel at the moment it is due, on a connection that was opened before, and that moment is known. An
event's time is taken where its bytes leave the socket, before any parsing; a library hands them over to a
task that runs after everything else that is ready. Against the scripted server at 250 streams of 32 tokens a
second, aiohttp 3.14 with the same parser of events saw them 0.44 ms late at the 99th percentile and took 47 %
of a core; this 0.11 ms and 30 % (2 cores of an AMD EPYC shared with other work, both processes at real-time
priority, November 2026).
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Callable
from typing import Protocol

import httptools

from loadgen.send.client import Exchange
from loadgen.send.http.openai_answers import retry_after_s, shown, take_body, take_event
from loadgen.send.http.sse_reader import EventTooLong, SseParser
from loadgen.send.timers import Urgent

MAX_HEAD_BYTES = 256 * 1024
MAX_BODY_BYTES = 4 * 1024 * 1024
"""Of an answer that is no stream, this much is kept."""
MAX_INFLATED_BYTES = 64 * 1024 * 1024
"""Of one piece of a compressed answer."""
LINGER_S = 2.0
STALE_S = 0.5
"""A used connection that ends without a word so soon after a request went out was closed by the server before
it saw the request."""
_SSE_BEGINNINGS = (b"data:", b"event:", b"id:", b"retry:", b":")


class Owner(Protocol):
    """Who keeps the connections to one endpoint."""

    def connected(self, connection: HttpConnection) -> None: ...

    def idle(self, connection: HttpConnection) -> None:
        """Its answer has been read to the end, and it may be used again."""

    def lost(self, connection: HttpConnection) -> None: ...

    def resend(self, data: bytes, exchange: Exchange) -> None:
        """The connection was already closed by the server when the request went out on it."""


class HttpConnection(asyncio.Protocol):
    """Carries one exchange at a time. Made by `owner`'s connecting, ended by either side."""

    def __init__(self, owner: Owner, clock: Callable[[], float], urgent: Urgent, *, is_plain: bool) -> None:
        """`is_plain`: without TLS, so that bytes can be given to the kernel directly."""
        self._owner = owner
        self._urgent = urgent
        self._clock = clock
        self._is_plain = is_plain
        self._transport: asyncio.Transport | None = None
        self._fd = -1
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._data = b""
        self._at_s = 0.0
        self.num_served = 0
        self.since_s = clock()
        """When it was opened, began to carry a request, or became idle again."""
        self._is_awaiting = False  # an answer's end, whether or not somebody still reads it
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._head_bytes = 0
        self._num_bytes = 0
        self._status = 0
        self._in_head = True
        self._is_framed = False
        self._sse: SseParser | None = None
        self._is_stream = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._inflate: zlib._Decompress | None = None
        self._location = b""

    def lingers(self, now_s: float) -> bool:
        """Whether the answer's end was seen, but the server has not ended the response, and takes its
        time."""
        return self._is_awaiting and self._exchange is None and now_s - self._at_s > LINGER_S

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and not self._is_awaiting

    # Sending.

    def start(self, data: bytes, exchange: Exchange) -> None:
        """Send a whole request, now. Only while usable."""
        assert self._transport is not None
        self._begin_answer()
        self._exchange, self._data, self._is_awaiting = exchange, data, True
        self.since_s = self._clock()
        exchange.on_hang_up(self._hang_up)
        if not self._is_plain:
            self._transport.write(data)
            exchange.sent_s = self._clock()
            return
        # Into the kernel, at once: the transport would do so at the end of the loop's turn, after everything
        # else that is due.
        try:
            num_sent = os.write(self._fd, data)
        except BlockingIOError:
            num_sent = 0
        except OSError:  # it has just been closed; the transport will say so
            num_sent = 0
        if num_sent < len(data):
            self._transport.write(data[num_sent:])  # `resume_writing` is called once it is all gone, …
            if self._transport.get_write_buffer_size() == 0 and not self._transport.is_closing():
                exchange.sent_s = self._clock()  # … unless the transport could write it all at once
        else:
            exchange.sent_s = self._clock()

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        if self._exchange is not None and self._exchange.sent_s is None:
            self._exchange.sent_s = self._clock()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _hang_up(self) -> None:
        self._exchange = None
        self.close()

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is one in all but name
        self._transport.set_write_buffer_limits(high=0)  # type: ignore[union-attr]
        self._fd = transport.get_extra_info("socket").fileno()
        self._owner.connected(self)

    def data_received(self, data: bytes) -> None:
        at_s = self._at_s = self._clock()
        if at_s >= self._urgent.at_s:
            self._urgent.ring()
        self._num_bytes += len(data)
        if not self._is_awaiting:
            self.close()  # nothing was asked
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server does not speak HTTP/1.1: {error or shown(data)}")
            self.close()
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(f"the answer's head is longer than {MAX_HEAD_BYTES} bytes")
            self.close()

    def eof_received(self) -> bool:
        return False  # close our side too: a server that sends no more has nothing to say

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        exchange = self._exchange
        if exchange is not None:
            now_s = self._clock()
            if self._num_bytes == 0 and self.num_served > 0 and now_s - self.since_s < STALE_S:
                self._exchange = None
                self._owner.resend(self._data, exchange)
            elif not self._in_head and not self._is_framed and error is None:
                self._at_s = now_s
                self._end_answer(exchange)  # the end of the connection is the answer's end
            else:
                how = "reset" if error is not None else "closed"
                where = (
                    "before an answer"
                    if self._num_bytes == 0
                    else f"in the middle of the answer, after {exchange.num_tokens} tokens"
                )
                self._at_s = now_s
                self._fail(f"the connection was {how} by the server {where}")
        self._owner.lost(self)

    # The parser's side.

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._is_framed = True
        elif exchange is None:
            return
        elif name == b"content-type":
            self._is_stream = value.lower().lstrip().startswith(b"text/event-stream")
        elif name == b"content-encoding":
            self._decode(value.strip().lower())
        elif name == b"x-request-id":
            exchange.request_id = value.decode("latin-1")
        elif name == b"retry-after":
            exchange.retry_after_s = retry_after_s(value.decode("latin-1"))
        elif name == b"retry-after-ms" and value.strip().isdigit():
            exchange.retry_after_s = int(value) / 1e3
        elif name == b"location":
            self._location = value

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._in_head = self._status < 200
        exchange = self._exchange
        if exchange is None or self._in_head:
            return
        exchange.status = self._status
        if self._status == 200 and self._is_stream:
            self._sse = SseParser()

    def on_body(self, body: bytes) -> None:
        if self._exchange is None:
            return
        if self._inflate is not None:
            try:
                body = self._inflate.decompress(body, MAX_INFLATED_BYTES)
            except zlib.error as error:
                self._fail(f"the server's compressed answer cannot be read: {error}")
                return
            if self._inflate.unconsumed_tail:
                self._fail(f"a piece of the server's compressed answer is longer than {MAX_INFLATED_BYTES} bytes")
                return
        if self._sse is not None:
            self._take_events(body)
            return
        self._body.append(body)
        self._body_bytes += len(body)
        if self._status == 200 and len(self._body) == 1 and body.lstrip().startswith(_SSE_BEGINNINGS):
            self._sse = SseParser()  # a stream under another name
            self._take_events(body)
        elif self._body_bytes > MAX_BODY_BYTES:
            self._fail(f"the server sent {self._body_bytes} bytes that are no stream")
            self.close()

    def on_message_complete(self) -> None:
        if self._status < 200:
            return  # 100 Continue and the like: the answer is still to come
        if self._exchange is not None:
            self._end_answer(self._exchange)
        self._is_awaiting = False
        self._in_head = True
        self.num_served += 1
        if self._transport is None or self._transport.is_closing():
            return
        if self._parser.should_keep_alive():
            self.since_s = self._at_s
            self._owner.idle(self)
        else:
            self.close()

    def _take_events(self, body: bytes) -> None:
        exchange, sse = self._exchange, self._sse
        assert exchange is not None
        assert sse is not None
        try:
            for name, data in sse.feed(body):
                take_event(exchange, self._at_s, name, data)
                if exchange.ended_s is not None:
                    self._exchange = None
                    break
        except EventTooLong as error:
            self._fail(f"the server sent a stream that is out of bounds: {error}")
            self.close()

    def _end_answer(self, exchange: Exchange) -> None:
        """The answer has come to an end, and the exchange has not."""
        self._exchange = None
        if 300 <= self._status < 400:
            exchange.fail(self._at_s, f"redirected to {shown(self._location)}: give that address")
        elif self._sse is None:
            take_body(exchange, self._at_s, b"".join(self._body))
        elif self._sse.has_rest:
            exchange.fail(self._at_s, "the stream ended in the middle of an event")
        else:
            exchange.end(self._at_s)

    def _decode(self, encoding: bytes) -> None:
        if encoding in (b"gzip", b"x-gzip", b"deflate"):
            self._inflate = zlib.decompressobj(wbits=47)  # of either kind
        elif encoding not in (b"", b"identity"):
            self._fail(f"the server compresses with {shown(encoding)}, though it was asked not to compress")

    def _fail(self, error: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.fail(self._at_s, error)
