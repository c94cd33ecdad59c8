"""Server-sent events for any bytes in any chunks."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.send.http.sse_reader import EventTooLong, SseParser


def parse(*chunks: bytes, max_bytes: int = 1 << 20) -> list[tuple[bytes, bytes]]:
    parser = SseParser(max_bytes)
    return [event for chunk in chunks for event in parser.feed(chunk)]


def reference(stream: bytes) -> list[tuple[bytes, bytes]]:
    """The standard's algorithm, line by line, on the complete stream."""
    lines = re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))
    events, name, data = [], b"", []
    for line in lines[:-1]:
        if not line:
            if data:
                events.append((name, b"\n".join(data)))
            name, data = b"", []
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return events


def cuts(stream: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({place % (len(stream) + 1) for place in places} | {0, len(stream)})
    return [stream[low:high] for low, high in itertools.pairwise(edges)]


PIECES = [
    b"data: {}",
    b"data:x",
    b"data",
    b"event: error",
    b": comment",
    b"id: 7",
    b"retry: 5",
    b"data:  two",
    b"database: no",
    b"\xff\xfe",
    b"",
]
STREAMS = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=20).map(
    lambda lines: b"".join(piece + end for piece, end in lines)
)


@given(STREAMS | st.binary(max_size=60), st.lists(st.integers(0, 200), max_size=8))
def test_arbitrary_stream_in_arbitrary_chunks_matches_the_standard(stream: bytes, places: list[int]) -> None:
    # What ends with a lone CR may go on with its LF; the line is complete either way, as the reference has
    # it.
    assert parse(*cuts(stream, places)) == reference(stream)


def test_completion_events_are_parsed() -> None:
    assert parse(b'data: {"a": 1}\n\ndata: [DONE]\n\n') == [(b"", b'{"a": 1}'), (b"", b"[DONE]")]
    assert parse(b'event: error\r\ndata: {"error": 1}\r\n\r\n') == [(b"error", b'{"error": 1}')]


def test_crlf_split_over_two_chunks_is_one_line_end() -> None:
    assert parse(b"data: a\r", b"\n", b"data: b\r\n\r", b"\n") == [(b"", b"a\nb")]


@given(st.integers(1, 40))
def test_line_length_is_bounded_for_any_chunks(size: int) -> None:
    for chunks in ([b"data: " + b"x" * size + b"\n\n"], [b"data: "] + [b"x"] * size + [b"\n\n"]):
        if size + 6 > 30:
            with pytest.raises(EventTooLong):
                parse(*chunks, max_bytes=30)
        else:
            assert parse(*chunks, max_bytes=30) == [(b"", b"x" * size)]


def test_event_size_is_bounded() -> None:
    with pytest.raises(EventTooLong):
        parse(b"data: 12345\n" * 10, max_bytes=60)
    with pytest.raises(EventTooLong):
        parse(*[b"data:\n"] * 20, max_bytes=60)


def test_partial_event_at_the_end_is_detected() -> None:
    parser = SseParser()
    parser.feed(b"data: a\n\n")
    assert not parser.has_partial_event
    parser.feed(b"data: b\n")
    assert parser.has_partial_event
    parser.feed(b"\n")
    assert not parser.has_partial_event
    parser.feed(b"da")
    assert parser.has_partial_event
