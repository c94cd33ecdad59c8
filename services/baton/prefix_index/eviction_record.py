"""Remembers which worker has evicted which block recently, to explain why a prefix is not cached."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.kv.block_hash import BlockHash

MAX_RECORD_BYTES = 16 * 2**20
"""Upper bound for the memory of the record."""
EVICTION_BYTES = 320
"""Memory of one evicted block: its hash, its place in the dictionary, and its share of the event."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """An event in which a worker has evicted blocks. `at_s`: event loop time at which it was read."""

    worker_id: str
    at_s: float


class EvictionRecord:
    """The last evictions of all workers. The oldest are forgotten first."""

    def __init__(self, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._max_blocks = max(1, max_bytes // EVICTION_BYTES)
        self._evicted: OrderedDict[BlockHash, Eviction] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered blocks."""
        return len(self._evicted)

    def add(self, worker_id: str, hashes: Iterable[BlockHash], now_s: float) -> None:
        """Remember that a worker has evicted these blocks."""
        eviction = Eviction(worker_id, now_s)
        for block_hash in hashes:
            self._evicted.pop(block_hash, None)
            self._evicted[block_hash] = eviction
        while len(self._evicted) > self._max_blocks:
            self._evicted.popitem(last=False)

    def last_of(self, chain: Sequence[BlockHash]) -> tuple[int, Eviction] | None:
        """Return (position, eviction) of the last block of a chain that is remembered."""
        for position in range(len(chain) - 1, -1, -1):
            eviction = self._evicted.get(chain[position])
            if eviction is not None:
                return position, eviction
        return None
