"""`HeaderMarks`: marks in the headers of slots, which say what the next process may use."""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from baton.worker.disk.disk_runner import DiskRunner


class HeaderStore(Protocol):
    """Headers of the slots of a file, see `worker.disk.block_file.BlockFile`. `drop` and `announce` block."""

    def sequence(self, slot: int) -> int: ...

    def drop(self, sequences: Mapping[int, int]) -> None: ...

    def announce(self, sequences: Mapping[int, int]) -> None: ...


class HeaderMarks:
    """Collects marks and writes all that wait together. Used from one event loop.

    A mark is for the content that its slot has at the call: one that is written later keeps its header.
    """

    def __init__(
        self, store: HeaderStore, runner: DiskRunner, start: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        """start: runs a coroutine as a task, see `RunningCalls.start`."""
        self._store, self._runner, self._start = store, runner, start
        self._to_drop: dict[int, int] = {}  # sequence numbers by slot
        self._to_announce: dict[int, int] = {}
        self._is_writing = False

    def drop(self, slots: Iterable[int]) -> None:
        """Mark slots as discarded, soon."""
        self._to_drop |= {slot: self._store.sequence(slot) for slot in slots}
        self._write_soon()

    def announce(self, slots: Iterable[int]) -> None:
        """Mark the content of slots as announced, soon."""
        self._to_announce |= {slot: self._store.sequence(slot) for slot in slots}
        self._write_soon()

    def _write_soon(self) -> None:
        if (self._to_drop or self._to_announce) and not self._is_writing:
            self._is_writing = True
            self._start(self._write_waiting())

    async def _write_waiting(self) -> None:
        """Write what waits, all at once, until nothing does."""
        try:
            while self._to_drop or self._to_announce:
                dropped, self._to_drop = self._to_drop, {}
                announced, self._to_announce = self._to_announce, {}
                await self._runner.write(partial(self._write, dropped, announced), 0)
        finally:
            self._is_writing = False

    def _write(self, dropped: Mapping[int, int], announced: Mapping[int, int]) -> None:
        self._store.announce(announced)
        self._store.drop(dropped)
