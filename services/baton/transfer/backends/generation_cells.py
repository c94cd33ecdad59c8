"""The memory of a reader into which entries of an owner's generation table are read, one cell for each."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from baton.transfer.backend import GenerationEntry
from baton.transfer.backends.block_ranges import CopyRange, runs
from baton.transfer.backends.host_memory import KvRegion, anonymous
from baton.transfer.integrity.generation_table import ENTRY_BYTES, decode_entries

_NUM_CELLS = 32_768
"""Generation-table entries that can be in flight at a time, 1 MiB in all."""


class GenerationCells:
    """Cells that running reads hold. Used by one thread.

    A cell is freed only when no read can write to it any more.
    """

    def __init__(self) -> None:
        self._cells = np.frombuffer(anonymous(_NUM_CELLS * ENTRY_BYTES), dtype=np.uint8).reshape(
            _NUM_CELLS, ENTRY_BYTES
        )
        self._free = deque(range(_NUM_CELLS))

    @property
    def region(self) -> KvRegion:
        """The memory of all cells, to be registered. It is allocated as long as this object exists."""
        return KvRegion(address=int(self._cells.ctypes.data), num_bytes=self._cells.nbytes)

    def take(self, num_cells: int) -> list[int] | None:
        """Return that many free cells in the order of their addresses; None if fewer are free."""
        if len(self._free) < num_cells:
            return None
        return sorted(self._free.popleft() for _ in range(num_cells))

    def free(self, cells: Iterable[int]) -> None:
        """Return cells that no read can write to any more."""
        self._free.extend(cells)

    def copies(self, table_address: int, block_ids: Sequence[int], cells: Sequence[int]) -> list[CopyRange]:
        """Return the copies that fill `cells` with the entries of `block_ids`.

        table_address: of the owner's generation table
        """
        local_address = int(self._cells.ctypes.data)
        return [
            (
                table_address + run.source * ENTRY_BYTES,
                local_address + run.own * ENTRY_BYTES,
                run.num_blocks * ENTRY_BYTES,
            )
            for run in runs(block_ids, cells)
        ]

    def entries(self, cells: Sequence[int]) -> tuple[GenerationEntry, ...]:
        """Return the entries that were read into `cells`."""
        return decode_entries(self._cells[cells].tobytes()) if cells else ()
