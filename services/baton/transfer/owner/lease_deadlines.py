"""A set of movable deadlines that finds all passed ones in logarithmic time."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_MAX_OUTDATED = 1024
"""Outdated heap entries from which they are removed, if they are more than the valid ones."""


class Deadlines(Generic[K]):
    """One deadline per key. A lease that is renewed for ever never hides another one that has passed.

    Moving a deadline later costs one dictionary write. Its heap entry is corrected when the old time comes,
    so each key has at most one valid heap entry. Entries of dropped keys are removed once they are the most.
    """

    __slots__ = ("_due", "_heap", "_serial")

    def __init__(self) -> None:
        self._due: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: K) -> bool:
        return key in self._due

    def set(self, key: K, deadline_s: float) -> None:
        """Set or move the deadline of `key`."""
        known = self._due.get(key)
        if known is not None and deadline_s >= known[0]:
            self._due[key] = (deadline_s, known[1])
            return
        self._serial += 1
        self._due[key] = (deadline_s, self._serial)
        heapq.heappush(self._heap, (deadline_s, self._serial, key))
        if len(self._heap) > 2 * len(self._due) + _MAX_OUTDATED:
            self._heap = [(at_s, serial, key) for key, (at_s, serial) in self._due.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Remove a key. Does nothing if it is unknown."""
        self._due.pop(key, None)

    def of(self, key: K) -> float | None:
        """Return the deadline of `key`, or None if it is unknown."""
        known = self._due.get(key)
        return None if known is None else known[0]

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, or None if there is none."""
        self._settle()
        return self._heap[0][0] if self._heap else None

    def pop_passed(self, now_s: float) -> list[K]:
        """Remove and return every key whose deadline is at or before `now_s`, earliest first."""
        passed: list[K] = []
        while True:
            self._settle()
            if not self._heap or self._heap[0][0] > now_s:
                return passed
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            passed.append(key)

    def _settle(self) -> None:
        """Drop or correct outdated entries at the top of the heap."""
        while self._heap:
            deadline_s, serial, key = self._heap[0]
            known = self._due.get(key)
            if known is None or known[1] != serial:
                heapq.heappop(self._heap)
            elif known[0] > deadline_s:
                heapq.heapreplace(self._heap, (known[0], serial, key))
            else:
                return
