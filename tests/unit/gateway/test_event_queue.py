"""The queue between a call and its connection: order, sizes of writes, and what counts as unread."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import Refused
from baton.gateway.http.asgi_io import PIECE_BYTES
from baton.gateway.http.output.event_queue import EventQueue
from baton.gateway.request.unread_output import UnreadStreams
from baton.runtime.process.byte_budget import Account, ByteBudget
from tests.scale import sized

SIZES = st.integers(0, 3) | st.integers(PIECE_BYTES - 1, 3 * PIECE_BYTES)


def queue_of(num_bytes: int = 10**7) -> EventQueue:
    budget = ByteBudget({Account.UNSENT: num_bytes})
    streams = UnreadStreams(budget, max_bytes=10**7, clock=lambda: 0.0)
    return EventQueue(streams.open(lambda failure: None))


@settings(max_examples=sized(60, 2000), deadline=None)
@given(events=st.lists(st.tuples(st.booleans(), SIZES), max_size=8))
def test_events_leave_in_order_and_in_bounded_pieces(events: list[tuple[bool, int]]) -> None:
    queue = queue_of()
    texts = [bytes([97 + at]) * size for at, (_, size) in enumerate(events)]
    num_counted = 0
    for (is_counted, size), text in zip(events, texts, strict=True):
        if is_counted:
            queue.put(text)
            num_counted += size
        else:
            queue.put_uncounted(text[:1], bytearray(text[1:]))
    assert queue.num_bytes == sum(map(len, texts))
    queue.end()

    async def read() -> list[bytes]:
        pieces = []
        while not queue.is_exhausted:
            pieces.append(await queue.next_piece())
        await queue.next_piece()
        return pieces

    pieces = asyncio.run(read())
    assert b"".join(pieces) == b"".join(texts)
    largest = max((size for is_counted, size in events if is_counted), default=0)
    assert all(len(piece) < PIECE_BYTES + max(largest, PIECE_BYTES) for piece in pieces)
    assert queue.num_bytes == 0


def test_event_that_counts_needs_memory_and_an_uncounted_one_does_not() -> None:
    queue = queue_of(num_bytes=10)
    queue.put_uncounted(b"x" * 100)
    with pytest.raises(Refused, match="unread output needs 11 bytes"):
        queue.put(b"x" * 11)
    queue.put(b"x" * 10)
    assert queue.num_bytes == 110


def test_dropped_events_are_not_written() -> None:
    queue = queue_of()
    queue.put(b"a")
    queue.put_uncounted(b"b")
    queue.drop()
    queue.end()
    assert queue.is_exhausted
    assert asyncio.run(queue.next_piece()) == b""


def test_reader_waits_for_the_next_event() -> None:
    async def read() -> bytes:
        queue = queue_of()
        reader = asyncio.create_task(queue.next_piece())
        await asyncio.sleep(0)
        assert not reader.done()
        queue.put_uncounted(b"a")
        queue.put(b"b")
        return await reader

    assert asyncio.run(read()) == b"ab"
