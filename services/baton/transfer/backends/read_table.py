"""Tracks the reads of a backend for the event loop, while the backend's thread reports their ends."""

import asyncio
from dataclasses import dataclass, field

from baton.core.ids import ReadId
from baton.transfer.backend import GenerationEntry, ReadState


@dataclass(slots=True)
class _PendingRead:
    """One read. `settled`: its first state other than RUNNING; `ended`: its terminal state."""

    settled: asyncio.Future[ReadState]
    ended: asyncio.Future[ReadState]
    generations: tuple[GenerationEntry, ...] = field(default=())


class ReadTable:
    """The state of every KV read of a backend, from its start until its release.

    A read is terminal once the transport has reported its success or failure. It is in doubt if the transport
    reported an error that does not end it. All methods except `report` must be called on the event loop.
    """

    __slots__ = ("_loop", "_reads")

    def __init__(self) -> None:
        self._reads: dict[ReadId, _PendingRead] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, read_id: ReadId) -> None:
        """Add a read. Raises ValueError if its id is in use."""
        if read_id in self._reads:
            raise ValueError(f"read {read_id} exists already; ids must not be reused")
        self._loop = asyncio.get_running_loop()
        self._reads[read_id] = _PendingRead(self._loop.create_future(), self._loop.create_future())

    def report(self, read_id: ReadId, state: ReadState, generations: tuple[GenerationEntry, ...] = ()) -> None:
        """Record from any thread that a read is in doubt or has ended, with the entries that it read."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.end, read_id, state, generations)

    def end(self, read_id: ReadId, state: ReadState, generations: tuple[GenerationEntry, ...] = ()) -> None:
        """Record on the event loop that a read is in doubt or has ended.

        A read that was in doubt ends as FAILED. Reports after the end are ignored.
        """
        read = self._reads.get(read_id)
        if read is None or read.ended.done():
            return
        was_in_doubt = read.settled.done()
        if not was_in_doubt:
            read.settled.set_result(state)
        if state is not ReadState.IN_DOUBT:
            read.generations = () if was_in_doubt else generations
            read.ended.set_result(ReadState.FAILED if was_in_doubt else state)

    def poll(self, read_id: ReadId) -> ReadState:
        """Return the state of a read. Raises ValueError for an unknown id."""
        read = self._find(read_id)
        if read.ended.done():
            return read.ended.result()
        return read.settled.result() if read.settled.done() else ReadState.RUNNING

    async def wait(self, read_id: ReadId) -> ReadState:
        """Wait until a read is terminal or in doubt and return its state."""
        return await asyncio.shield(self._find(read_id).settled)

    async def wait_ended(self, read_id: ReadId) -> ReadState:
        """Wait until a read is terminal and return its state."""
        return await asyncio.shield(self._find(read_id).ended)

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        """Return the generation-table entries that a read has read; empty for a read of KV blocks."""
        return self._find(read_id).generations

    def release(self, read_id: ReadId) -> None:
        """Remove a terminal read. Raises ValueError if it is still running or in doubt."""
        if not self._find(read_id).ended.done():
            raise ValueError(f"read {read_id} is still running or in doubt and may still write its destination")
        del self._reads[read_id]

    @property
    def running(self) -> tuple[ReadId, ...]:
        """Ids of the reads that are neither terminal nor in doubt."""
        return tuple(read_id for read_id, read in self._reads.items() if not read.settled.done())

    def _find(self, read_id: ReadId) -> _PendingRead:
        read = self._reads.get(read_id)
        if read is None:
            raise ValueError(f"read {read_id} is unknown or has been released")
        return read


class TrackedReads:
    """The part of `TransferBackend` that tells the state of reads, for backends that keep a `ReadTable`."""

    def __init__(self) -> None:
        self._reads = ReadTable()

    def poll(self, read_id: ReadId) -> ReadState:
        return self._reads.poll(read_id)

    async def wait(self, read_id: ReadId) -> ReadState:
        return await self._reads.wait(read_id)

    async def wait_ended(self, read_id: ReadId) -> ReadState:
        return await self._reads.wait_ended(read_id)

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        return self._reads.generations(read_id)

    def release(self, read_id: ReadId) -> None:
        self._reads.release(read_id)
