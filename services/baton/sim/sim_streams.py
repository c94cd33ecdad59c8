"""Streams of the simulated network: ordered messages in both directions, cuts, and deaths of processes."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, Generic, Protocol, TypeVar

from baton.core.errors import Failure, StreamBroken
from baton.core.interfaces import Duplex

T = TypeVar("T")
SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")

MAX_BUFFERED = 65_536

NETWORK = Context()
"""Context of the network's own timers, which no process clock and no pause affects."""


def start_in_network(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run work outside of any process, as a network card does."""
    return asyncio.get_running_loop().create_task(work, context=NETWORK.copy())


def process_at(address: str) -> str:
    """Return the name of the process at an address, `NAME:PORT`."""
    return address.partition(":")[0]


class StreamNetwork(Protocol):
    """The part of a network that its streams use."""

    def draw_delay(self) -> float:
        """Return the delay of one message in seconds."""
        ...

    def is_partitioned(self, pair: frozenset[str]) -> bool:
        """True if no message passes between these two processes."""
        ...

    def count_lost(self, num_messages: int) -> None:
        """Count messages that were under way in a stream that was cut."""
        ...

    def forget(self, stream: "SimStream") -> None:
        """Handle that both ends of a stream are broken."""
        ...


class SimEnd(Duplex[SendT, ReceiveT], Generic[SendT, ReceiveT]):
    """One end of a stream between two processes."""

    def __init__(self, stream: "SimStream") -> None:
        self._stream = stream
        # Timers of the same time fire in any order, so each timer delivers the oldest message, not its own.
        self._under_way: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._wake = asyncio.Event()
        self._broken: StreamBroken | None = None
        self._next_arrival_s = 0.0
        self._num_held = 0  # messages under way without a timer, because a partition began before they arrived
        self.other: SimEnd[Any, Any]

    def send(self, message: SendT) -> None:
        if len(self.other._arrived) >= MAX_BUFFERED:
            self._stream.cut("the buffer is full")
        if self._broken:
            raise StreamBroken(str(self._broken), self._broken.failure)
        self.other._arrive_later(message)

    async def receive(self) -> ReceiveT:
        while not self._arrived:
            if self._broken:
                raise StreamBroken(str(self._broken), self._broken.failure)
            self._wake.clear()
            await self._wake.wait()
        message: ReceiveT = self._arrived.popleft()
        return message

    async def aclose(self) -> None:
        self.end("closed by the other end")

    def end(self, reason: str, failure: Failure | None = None) -> None:
        """Close this end. The other end receives all sent messages, then the close with its reason."""
        if not self._broken:
            self.break_off(StreamBroken("this end is closed"))
            self.other._arrive_later(StreamBroken(reason, failure))

    def break_off(self, error: StreamBroken) -> None:
        """Make all further calls on this end raise `error`."""
        self._broken = self._broken or error
        self._wake.set()
        self._stream.forget_if_over()

    @property
    def is_broken(self) -> bool:
        """True after the stream was closed or cut."""
        return self._broken is not None

    def _arrive_later(self, message: Any) -> None:
        """Deliver a message after a random delay, but not before earlier ones.

        A StreamBroken closes this end.
        """
        self._under_way.append(message)
        if self._stream.is_partitioned:
            self._num_held += 1
        else:
            NETWORK.run(self._start_timer)

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_arrival_s = max(self._next_arrival_s, loop.time() + self._stream.draw_delay())
        loop.call_at(self._next_arrival_s, self._arrive)

    def release_held(self) -> None:
        """Let the messages arrive that a partition has held back."""
        num_held, self._num_held = self._num_held, 0
        for _ in range(num_held):
            NETWORK.run(self._start_timer)

    def _arrive(self) -> None:
        if self._stream.is_partitioned:
            self._num_held += 1
            return
        message = self._under_way.popleft()
        if self._broken:
            return
        if isinstance(message, StreamBroken):
            self.break_off(message)
            return
        self._arrived.append(message)
        self._wake.set()


class SimStream:
    """A stream: its two ends and the addresses of their processes (`hosts`)."""

    def __init__(self, network: StreamNetwork, hosts: tuple[str, str], number: int) -> None:
        self._network = network
        self.hosts = hosts
        self.processes = frozenset(map(process_at, hosts))
        self.number = number
        self.is_cut_on_heal = False
        self.ends: tuple[SimEnd[Any, Any], SimEnd[Any, Any]] = (SimEnd(self), SimEnd(self))
        self.ends[0].other, self.ends[1].other = self.ends[1], self.ends[0]

    def draw_delay(self) -> float:
        """Return the delay of one message in seconds."""
        return self._network.draw_delay()

    def cut(self, reason: str = "the connection was cut") -> None:
        """Break both ends immediately. Messages under way are lost and counted."""
        self._network.count_lost(self.num_under_way)
        for end in self.ends:
            end._arrived.clear()
            end.break_off(StreamBroken(reason))

    def die(self, address: str) -> None:
        """Break the stream because the process at one of its ends has died.

        While the stream is partitioned, the other end does not learn of it.
        """
        if not self.is_partitioned:
            self.cut("the process died")
            return
        for host, end in zip(self.hosts, self.ends, strict=True):
            if host == address:
                end.break_off(StreamBroken("the process died"))
                self.is_cut_on_heal = True

    @property
    def is_partitioned(self) -> bool:
        """True while no message of this stream arrives."""
        return self._network.is_partitioned(self.processes)

    @property
    def num_under_way(self) -> int:
        """Number of messages in both directions that were sent and not yet received."""
        return sum(len(end._arrived) + len(end._under_way) for end in self.ends if not end.is_broken)

    def forget_if_over(self) -> None:
        """Remove the stream from the network once both ends are broken."""
        if all(end.is_broken for end in self.ends):
            self._network.forget(self)
