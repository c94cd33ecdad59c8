"""The reads of a backend as its caller, the event loop, sees them; their ends are reported from the backend's
own thread."""

import asyncio
from dataclasses import dataclass, field

from baton.core.ids import ReadId
from baton.transfer.backend import GenerationEntry, ReadState


@dataclass(slots=True)
class _PendingRead:
    ended: asyncio.Future[ReadState]
    generations: tuple[GenerationEntry, ...] = field(default=())


class ReadTable:
    """Every read from its start until it is released. All methods but `report` belong to the event loop."""

    __slots__ = ("_loop", "_reads")

    def __init__(self) -> None:
        self._reads: dict[ReadId, _PendingRead] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, read_id: ReadId) -> None:
        """Raises ValueError for an id that is in use."""
        if read_id in self._reads:
            raise ValueError(f"read {read_id} exists already")
        self._loop = asyncio.get_running_loop()
        self._reads[read_id] = _PendingRead(self._loop.create_future())

    def report(self, read_id: ReadId, state: ReadState, generations: tuple[GenerationEntry, ...] = ()) -> None:
        """From any thread: the read is terminal."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.end, read_id, state, generations)

    def end(self, read_id: ReadId, state: ReadState, generations: tuple[GenerationEntry, ...] = ()) -> None:
        read = self._reads.get(read_id)
        if read is not None and not read.ended.done():
            read.generations = generations
            read.ended.set_result(state)

    def poll(self, read_id: ReadId) -> ReadState:
        read = self._find(read_id)
        return read.ended.result() if read.ended.done() else ReadState.RUNNING

    async def wait(self, read_id: ReadId) -> ReadState:
        return await asyncio.shield(self._find(read_id).ended)

    def generations(self, read_id: ReadId) -> tuple[GenerationEntry, ...]:
        return self._find(read_id).generations

    def release(self, read_id: ReadId) -> None:
        if self.poll(read_id) is ReadState.RUNNING:
            raise ValueError(f"read {read_id} is still running: what it lands in may still be written")
        del self._reads[read_id]

    @property
    def running(self) -> tuple[ReadId, ...]:
        return tuple(read_id for read_id, read in self._reads.items() if not read.ended.done())

    def _find(self, read_id: ReadId) -> _PendingRead:
        read = self._reads.get(read_id)
        if read is None:
            raise ValueError(f"read {read_id} is unknown or has been released")
        return read
