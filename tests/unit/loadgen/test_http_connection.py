"""One connection with handwritten input: every kind of response gives the right result with the right
times."""

import asyncio
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.send.client import Exchange
from loadgen.send.http.http_connection import ConnectionLimits, HttpConnection
from loadgen.send.timers import DueCheck


class Socket:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd


class Transport(asyncio.Transport):
    """Keeps written data in its buffer while `takes` is False."""

    def __init__(self, fd: int = -1) -> None:
        super().__init__({"socket": Socket(fd)})
        self.written = b""
        self.num_buffered = 0
        self.takes = True
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def write(self, data: Any) -> None:
        self.written += data
        self.num_buffered += 0 if self.takes else len(data)

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class Wire:
    """A connection with its owner and clock. `exchange` is in flight from the start."""

    def __init__(
        self,
        cancel_after: int | None = None,
        *,
        data: bytes = b"POST",
        transport: Transport | None = None,
        **limits: Any,
    ) -> None:
        """The connection uses TLS, unless `transport` has a file descriptor."""
        self.now_s = 10.0
        self.due_check = DueCheck()
        self.num_idle = 0
        self.resent: list[bytes] = []
        self.ends: list[Exchange] = []
        self.transport = transport or Transport()
        self.connection = HttpConnection(
            self,
            lambda: self.now_s,
            self.due_check,
            is_plain=transport is not None,
            limits=ConnectionLimits(**limits),
        )
        self.connection.connection_made(self.transport)
        self.exchange = self.send(cancel_after, data)

    def send(self, cancel_after: int | None = None, data: bytes = b"POST") -> Exchange:
        exchange = Exchange(0, self.ends.append, cancel_after)
        self.connection.start(data, exchange)
        return exchange

    def get(self, *chunks: bytes) -> Exchange:
        for chunk in chunks:
            self.now_s += 1.0
            if not self.transport.is_aborted:
                self.connection.data_received(chunk)
        return self.exchange

    def close(self, error: Exception | None = None) -> Exchange:
        self.now_s += 1.0
        self.connection.connection_lost(error)
        return self.exchange

    # As http_connection.Owner.

    def connected(self, connection: HttpConnection) -> None: ...

    def idle(self, connection: HttpConnection) -> None:
        self.num_idle += 1

    def lost(self, connection: HttpConnection) -> None: ...

    def resend(self, data: bytes, exchange: Exchange) -> None:
        self.resent.append(data)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(token_id: int, finish: str | None = None) -> bytes:
    return event(id="cmpl-1", choices=[{"index": 0, "text": "x", "token_ids": [token_id], "finish_reason": finish}])


USAGE = event(
    choices=[],
    usage={"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    baton={"a": 1},
)
DONE = b"data: [DONE]\n\n"


def head(status: int = 200, kind: str = "text/event-stream", **fields: str) -> bytes:
    lines = {"content-type": kind, **{name.replace("_", "-"): value for name, value in fields.items()}}
    return (
        f"HTTP/1.1 {status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    ).encode()


CHUNKED = {"transfer_encoding": "chunked", "x_request_id": "r1"}


def chunk(*data: bytes, last: bool = False) -> bytes:
    body = b"".join(data)
    return b"%x\r\n%b\r\n" % (len(body), body) + (b"0\r\n\r\n" if last else b"")


def response(status: int, body: bytes, **fields: str) -> bytes:
    return head(status, "application/json", content_length=str(len(body)), **fields) + body


def test_complete_response_has_the_times_of_its_events() -> None:
    wire = Wire()
    exchange = wire.get(head(**CHUNKED), chunk(token(7)), chunk(token(8, "length")), chunk(USAGE, DONE, last=True))
    assert (exchange.times, exchange.counts, exchange.token_ids) == ([12.0, 13.0], [1, 1], [7, 8])
    assert (exchange.sent_s, exchange.ended_s, exchange.status, exchange.error) == (10.0, 14.0, 200, "")
    assert (exchange.is_complete, exchange.finish_reason, exchange.request_id, exchange.timeline) == (
        True,
        "length",
        "r1",
        {"a": 1},
    )
    assert (exchange.num_prompt_tokens, exchange.num_output_tokens, exchange.num_cached_tokens) == (5, 2, 4)
    assert wire.num_idle == 1
    again = wire.send()
    wire.get(head(**CHUNKED), chunk(token(9, "stop")), chunk(DONE, last=True))
    assert (again.token_ids, again.is_complete, wire.num_idle, len(wire.ends)) == ([9], True, 2, 2)


@given(st.lists(st.integers(0, 2000), max_size=10))
def test_result_does_not_depend_on_chunk_boundaries(places: list[int]) -> None:
    stream = head(**CHUNKED) + chunk(token(7), token(8)) + chunk(token(9, "length")) + chunk(USAGE, DONE, last=True)
    edges = sorted({place % len(stream) for place in places} | {0, len(stream)})
    wire = Wire()
    exchange = wire.get(*(stream[low:high] for low, high in itertools.pairwise(edges)))
    assert (exchange.token_ids, exchange.counts, exchange.is_complete, exchange.error) == (
        [7, 8, 9],
        [1, 1, 1],
        True,
        "",
    )
    assert (exchange.num_cached_tokens, wire.num_idle) == (4, 1)
    assert exchange.times == sorted(exchange.times)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_arbitrary_bytes_do_not_raise(noise: bytes, place: int) -> None:
    stream = head(**CHUNKED) + chunk(token(7)) + chunk(token(9, "length")) + chunk(USAGE, DONE, last=True)
    place %= len(stream)
    wire = Wire()
    wire.get(stream[:place], noise, stream[place:])
    wire.close()
    assert len(wire.ends) + len(wire.resent) == 1
    assert wire.exchange.is_over or wire.resent


@pytest.mark.parametrize(
    "data",
    [
        b"{]",
        b"nonsense",
        b"7",
        b'"text"',
        b"[]",
        b"{}",
        b'{"choices": 5}',
        b'{"choices": [5]}',
        b'{"choices": [{"text": 5}]}',
        b'{"choices": [{"text": "a", "token_ids": ["a"]}]}',
        b'{"choices": [{"text": "a", "token_ids": 3}]}',
        b'{"choices": [], "usage": [1]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_invalid_event_fails_and_keeps_earlier_tokens(data: bytes) -> None:
    wire = Wire()
    exchange = wire.get(head(**CHUNKED), chunk(token(7)), chunk(b"data: " + data + b"\n\n"))
    assert "the server sent an invalid completion event" in exchange.error
    assert (exchange.token_ids, exchange.is_complete, wire.transport.is_aborted) == ([7], False, True)


@pytest.mark.parametrize(
    ("body", "reason", "message"),
    [
        (
            b'{"error": {"message": "too busy", "type": "rate_limit_error", "code": "ttft_slo", "status": 429}}',
            "ttft_slo",
            "too busy",
        ),
        (b'{"object": "error", "message": "too busy", "type": "TooMany", "code": 429}', "TooMany", "too busy"),
        (b'{"error": "too busy"}', "", "too busy"),
        (b'{"detail": "too busy"}', "", "too busy"),
        (b"<html>too busy</html>", "", "<html>too busy</html>"),
        (b"", "", "status 429 without a body"),
    ],
)
def test_rejections_of_all_known_formats_are_parsed(body: bytes, reason: str, message: str) -> None:
    exchange = Wire().get(response(429, body, retry_after="3"))
    assert (exchange.status, exchange.reason, exchange.error, exchange.retry_after_s) == (429, reason, message, 3.0)
    assert not exchange.is_complete


def test_error_body_with_status_200_keeps_its_own_status() -> None:
    exchange = Wire().get(response(200, b'{"error": {"message": "no", "code": 503, "type": "unavailable"}}'))
    assert (exchange.status, exchange.error, exchange.reason) == (503, "no", "unavailable")


def test_error_in_stream_keeps_tokens_and_status() -> None:
    error = {"message": "worker w1 is lost", "code": "worker_lost", "status": 503}
    exchange = Wire().get(head(**CHUNKED), chunk(token(7)), chunk(b"event: error\n", event(error=error), last=True))
    assert (exchange.token_ids, exchange.error, exchange.reason, exchange.status) == (
        [7],
        "worker w1 is lost",
        "worker_lost",
        503,
    )


def test_response_without_stream_fails() -> None:
    assert (
        Wire().get(response(200, b'{"choices": [{"text": "hello"}]}')).error
        == "the server sent a complete response instead of a stream"
    )
    assert Wire().get(response(200, b"")).error == "the server sent an empty response"
    assert "no event stream: <html>" in Wire().get(response(200, b"<html>hello")).error


def test_stream_with_other_content_type_is_read() -> None:
    body = token(7, "length") + DONE
    exchange = Wire().get(head(kind="text/plain", content_length=str(len(body))), body)
    assert (exchange.token_ids, exchange.is_complete, exchange.error) == ([7], True, "")


def test_stream_without_done_is_incomplete_without_error() -> None:
    exchange = Wire().get(head(**CHUNKED), chunk(token(7, "length"), last=True))
    assert (exchange.token_ids, exchange.is_complete, exchange.error, exchange.ended_s) == ([7], False, "", 12.0)


def test_done_without_a_finish_reason_is_not_complete() -> None:
    exchange = Wire().get(head(**CHUNKED), chunk(token(7), DONE, last=True))
    assert (exchange.is_complete, exchange.error) == (False, "")


def test_connection_closed_in_stream_fails() -> None:
    wire = Wire()
    wire.get(head(**CHUNKED), chunk(token(7)))
    exchange = wire.close()
    assert exchange.error == "the connection was closed by the server in the middle of the response, after 1 tokens"
    assert (exchange.times, exchange.ended_s, wire.resent) == ([12.0], 13.0, [])
    wire = Wire()
    wire.get(head(**CHUNKED))
    assert "reset by the server in the middle" in wire.close(ConnectionResetError()).error
    assert "closed by the server before a response" in Wire().close().error


def test_connection_end_ends_an_unframed_response() -> None:
    wire = Wire()
    wire.get(head(), token(7, "length"))
    exchange = wire.close()
    assert (exchange.error, exchange.is_complete, exchange.num_tokens) == ("", False, 1)
    wire = Wire()
    wire.get(head(), token(7), b"data: {")
    assert wire.close().error == "the stream ended in the middle of an event"


def test_done_ends_the_exchange_before_the_http_response() -> None:
    wire = Wire()
    exchange = wire.get(head(**CHUNKED), chunk(token(7, "stop"), DONE))
    assert (exchange.is_complete, wire.num_idle, wire.connection.is_usable) == (True, 0, False)
    assert not wire.connection.is_lingering(wire.now_s + 1)
    assert wire.connection.is_lingering(wire.now_s + ConnectionLimits().linger_s + 1)


def test_request_on_a_just_closed_connection_is_resent() -> None:
    wire = Wire()
    wire.get(head(**CHUNKED), chunk(token(7, "stop"), DONE, last=True))
    wire.send()
    wire.now_s -= 0.9
    wire.close()
    assert (wire.resent, len(wire.ends)) == ([b"POST"], 1)
    wire = Wire()
    wire.get(head(**CHUNKED), chunk(token(7, "stop"), DONE, last=True))
    late = wire.send()
    wire.now_s += 5  # the server received the request before it died
    wire.close()
    assert (wire.resent, late.error) == ([], "the connection was closed by the server before a response")


def compressed(kind: str, *parts: bytes) -> Sequence[bytes]:
    maker = zlib.compressobj(wbits=31 if kind == "gzip" else 15)
    return [maker.compress(part) + maker.flush(zlib.Z_SYNC_FLUSH) for part in parts]


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
def test_compressed_stream_is_read_incrementally(kind: str) -> None:
    one, two = compressed(kind, token(7), token(8, "length") + DONE)
    exchange = Wire().get(head(content_encoding=kind, **CHUNKED), chunk(one), chunk(two, last=True))
    assert (exchange.token_ids, exchange.times, exchange.is_complete) == ([7, 8], [12.0, 13.0], True)


def test_bad_or_excessive_compression_fails() -> None:
    assert "unsupported compression br" in Wire().get(head(content_encoding="br", **CHUNKED), chunk(b"x")).error
    assert "cannot be decoded" in Wire().get(head(content_encoding="gzip", **CHUNKED), chunk(b"no gzip at all")).error
    bomb = gzip.compress(b"data: " + b"x" * 100_000)
    assert (
        "longer than 1000 bytes"
        in Wire(inflated_bytes=1000).get(head(content_encoding="gzip", **CHUNKED), chunk(bomb)).error
    )


def test_body_and_header_are_bounded() -> None:
    wire = Wire(body_bytes=1000)
    assert "2000 bytes that are not an event stream" in wire.get(response(200, b"x" * 2000)).error
    wire = Wire(head_bytes=1000)
    assert wire.get(b"HTTP/1.1 200 X\r\n", *[b"a: " + b"x" * 300 + b"\r\n"] * 5).error.endswith(
        "header is longer than 1000 bytes"
    )
    assert wire.transport.is_aborted


def test_invalid_http_is_reported() -> None:
    assert "is not valid HTTP/1.1" in Wire().get(b"SSH-2.0-OpenSSH_9.6\r\n").error


def test_status_100_is_skipped() -> None:
    exchange = Wire().get(b"HTTP/1.1 100 Continue\r\n\r\n", head(**CHUNKED), chunk(token(7, "stop"), DONE, last=True))
    assert (exchange.status, exchange.is_complete) == (200, True)


def test_redirect_is_not_followed() -> None:
    exchange = Wire().get(response(307, b"", location="http://elsewhere/v1/completions"))
    assert (exchange.status, exchange.error) == (
        307,
        "redirected to http://elsewhere/v1/completions; use that address as --url",
    )


def test_cancel_after_tokens_closes_the_connection() -> None:
    wire = Wire(cancel_after=2)
    exchange = wire.get(head(**CHUNKED), chunk(token(7)), chunk(token(8)), chunk(token(9)))
    assert (exchange.token_ids, exchange.left_early, exchange.ended_s, wire.transport.is_aborted) == (
        [7, 8],
        True,
        13.0,
        True,
    )


def test_text_without_ids_counts_one_token_per_message() -> None:
    chat = [
        event(choices=[{"delta": delta, "finish_reason": None}])
        for delta in ({"role": "assistant", "content": ""}, {"content": "a"})
    ]
    last = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    exchange = Wire().get(head(**CHUNKED), *map(chunk, chat), chunk(last), chunk(DONE, last=True))
    assert (exchange.times, exchange.texts, exchange.is_complete, exchange.token_ids) == ([13.0], ["a"], True, [])


def test_token_without_text_is_counted() -> None:
    parts = [{"text": "", "token_ids": [7]}, {"text": "é", "token_ids": [8]}, {"text": "!", "token_ids": []}]
    exchange = Wire().get(head(**CHUNKED), *(chunk(event(choices=[part])) for part in parts))
    assert (exchange.times, exchange.counts, exchange.token_ids) == ([12.0, 13.0], [1, 1], [7, 8])


def test_due_requests_are_sent_before_received_data_is_processed() -> None:
    wire = Wire()
    rung: list[int] = []
    wire.due_check.at_s = 12.0
    wire.due_check.fire = lambda: rung.append(wire.exchange.num_tokens)
    wire.get(head(**CHUNKED), chunk(token(7)))
    assert (rung, wire.exchange.times) == ([0], [12.0])


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Return (write end, read end) of a pipe that accepts about 64 KiB at first."""
    out, into = os.pipe()
    os.set_blocking(into, False)
    yield out, into
    os.close(out)
    os.close(into)


def test_request_written_completely_has_its_send_time(pipe: tuple[int, int]) -> None:
    wire = Wire(transport=Transport(pipe[1]))
    assert (os.read(pipe[0], 100), wire.transport.written, wire.exchange.sent_s) == (b"POST", b"", 10.0)


LONG = b"x" * (1 << 20)


def test_long_request_is_sent_when_its_rest_is_written(pipe: tuple[int, int]) -> None:
    transport = Transport(pipe[1])
    transport.takes = False
    wire = Wire(data=LONG, transport=transport)
    assert 0 < len(transport.written) < len(LONG)
    assert wire.exchange.sent_s is None
    wire.now_s = 12.0
    wire.connection.resume_writing()
    assert wire.exchange.sent_s == 12.0


def test_rest_written_immediately_sets_the_send_time(pipe: tuple[int, int]) -> None:
    """The transport calls neither `pause_writing` nor `resume_writing` in this case."""
    wire = Wire(data=LONG, transport=Transport(pipe[1]))
    assert 0 < len(wire.transport.written) < len(LONG)
    assert wire.exchange.sent_s == 10.0


def test_data_dropped_by_a_broken_connection_is_not_sent() -> None:
    """The transport's buffer is empty in this case, too."""
    transport = Transport()
    transport.is_aborted = True
    assert Wire(transport=transport).exchange.sent_s is None
