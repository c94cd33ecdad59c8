"""When the client of a streamed response counts as too slow, and which stream is cut off if memory is
short."""

import pytest

from baton.core.errors import Failure, Reason, Refused
from baton.gateway.request.unread_output import UnreadOutput, UnreadStreams
from baton.runtime.process.byte_budget import Account, ByteBudget


class Streams:
    """Streams with a limit of 100 bytes each, 300 bytes in all, a grace of 2 s, and a clock set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.budget = ByteBudget({Account.UNSENT: 300})
        self.all = UnreadStreams(self.budget, max_bytes=100, clock=lambda: self.now_s, grace_s=2.0)
        self.cut: list[Failure] = []

    def open(self) -> UnreadOutput:
        return self.all.open(self.cut.append)


def test_burst_above_the_limit_is_accepted_if_it_is_read_within_the_grace_period() -> None:
    streams = Streams()
    stream = streams.open()
    for _ in range(5):
        stream.add(250)
        streams.now_s += 1.9
        stream.remove(200)
        streams.now_s += 0.2
        stream.remove(50)
    assert stream.num_bytes == 0


def test_client_above_the_limit_for_longer_than_the_grace_period_is_a_slow_reader() -> None:
    streams = Streams()
    stream = streams.open()
    stream.add(101)
    streams.now_s = 2.0
    stream.add(1)
    streams.now_s = 2.1
    with pytest.raises(Refused, match="more than 100 bytes of the stream were unread for 2 s") as refused:
        stream.add(1)
    assert refused.value.failure.reason is Reason.SLOW_READER


def test_client_that_falls_below_the_limit_gets_a_new_grace_period() -> None:
    streams = Streams()
    stream = streams.open()
    stream.add(150)
    streams.now_s = 1.9
    stream.remove(60)
    stream.add(60)
    streams.now_s = 3.8
    stream.add(1)
    assert stream.num_bytes == 151


def test_stream_with_the_most_unread_output_is_cut_if_memory_is_short() -> None:
    streams = Streams()
    slow, fast = streams.open(), streams.open()
    slow.add(250)
    fast.add(60)
    assert [failure.reason for failure in streams.cut] == [Reason.SLOW_READER]
    assert (slow.num_bytes, fast.num_bytes) == (0, 60)
    with pytest.raises(Refused, match="most unread output"):
        slow.add(1)


def test_stream_that_asks_for_more_is_refused_if_it_has_the_most_unread_output() -> None:
    streams = Streams()
    slow, fast = streams.open(), streams.open()
    fast.add(60)
    slow.add(200)
    with pytest.raises(Refused, match="most unread output"):
        slow.add(100)
    assert not streams.cut
    assert fast.num_bytes == 60


def test_closed_stream_holds_no_bytes() -> None:
    streams = Streams()
    stream = streams.open()
    stream.add(80)
    stream.close()
    assert streams.budget.used(Account.UNSENT) == 0
