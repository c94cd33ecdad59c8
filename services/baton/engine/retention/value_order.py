"""Evicts the content first that is expected to save the fewest seconds for the time that it is kept.

The value of a block is the seconds that its next use saves, times the chance that its owner returns, per
second for which it is kept until then (`ContentOwners.return_rate`).
"""

from collections.abc import Callable, Set
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from baton.engine.retention.content_owner import ContentOwner, ContentUse
from baton.engine.retention.eviction_order import NOTHING

SavedSeconds = Callable[[int, bool], float]
"""(position in the chain, whether another tier has a copy) -> seconds that the next use saves. Above 0."""

MIN_OLD_ENTRIES = 64
"""Outdated entries of a heap are dropped once there are so many more of them than others."""

_Entry = tuple[int, int, int]
"""Content in its group: minus its position, number, block or slot. Lower ones are evicted first."""


class _Group:
    """The idle content of one owner that has a copy in another tier, or that has none.

    entries: by block or slot
    in_order: a heap of entries, some of which are gone
    rate: chance of its owner's return per second, when it was computed last
    next_at_s: when it is computed anew, because the owner's pause reaches its next bin; None: never
    number: of its present entry in the heap by value; others are outdated. -1: it is empty
    """

    __slots__ = ("entries", "has_copy", "in_order", "next_at_s", "number", "owner", "rate")

    def __init__(self, owner: ContentOwner | None, *, has_copy: bool) -> None:
        self.owner, self.has_copy = owner, has_copy
        self.entries: dict[int, _Entry] = {}
        self.in_order: list[_Entry] = []
        self.rate = 0.0
        self.next_at_s: float | None = None
        self.number = -1

    def first(self) -> _Entry | None:
        """Return the entry that is evicted next, without those that were taken out; None if there is none."""
        while self.in_order and self.in_order[0] is not self.entries.get(self.in_order[0][2]):
            heappop(self.in_order)
        return self.in_order[0] if self.in_order else None

    def add(self, entry: _Entry) -> None:
        self.entries[entry[2]] = entry
        heappush(self.in_order, entry)
        if len(self.in_order) > 2 * len(self.entries) + MIN_OLD_ENTRIES:
            self.in_order = sorted(self.entries.values())


class _NextContent(NamedTuple):
    """The next content of a group that `first` returns. Sorted by value."""

    value: float
    number: int
    entry: _Entry
    group: _Group


class ValueOrder:
    """Implements `EvictionOrder`.

    An owner's content is evicted from the end of its chains, whatever was used last; what has a copy in
    another tier apart from what has none. Each such group is in a heap by the value of what it would lose
    next. Chances change with time only when a pause reaches its next bin, for which there is a second heap.
    Each operation therefore takes logarithmic time, if the bins of a pause are not counted.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        return_rate: Callable[[ContentOwner | None], float],
        saved_s: SavedSeconds,
        has_copy: Callable[[int], bool],
    ) -> None:
        """has_copy: returns True if another tier has a copy of the content of a block or slot"""
        self._clock, self._return_rate = clock, return_rate
        self._saved_s, self._has_copy = saved_s, has_copy
        self._groups: dict[tuple[ContentOwner | None, bool], _Group] = {}
        self._group_of: dict[int, _Group] = {}
        self._by_value: list[tuple[float, int, _Group]] = []
        self._next_bins: list[tuple[float, int, _Group]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._group_of

    def put(self, block_id: int, use: ContentUse) -> None:
        self._add(use.owner, (-use.position, next(self._numbers), block_id))

    def remove(self, block_id: int) -> None:
        group = self._group_of.pop(block_id)
        entry = group.entries[block_id]
        was_next = group.first() is entry
        del group.entries[block_id]
        if not group.entries:
            del self._groups[group.owner, group.has_copy]
            group.number, group.next_at_s = -1, None
        elif was_next:
            self._rank(group)

    def first(self, count: int, excluded: Set[int] = NOTHING) -> list[int]:
        self._assess_changed()
        found: list[int] = []
        opened: list[tuple[float, int, _Group]] = []
        passed: list[_NextContent] = []
        cursors: list[_NextContent] = []
        while len(found) < count:
            top = self._lowest()
            if top is not None and (not cursors or top[0] <= cursors[0].value):
                opened.append(heappop(self._by_value))
                self._open(top[2], cursors)
            elif cursors:
                cursor = heappop(cursors)
                if cursor.entry[2] not in excluded:
                    found.append(cursor.entry[2])
                heappop(cursor.group.in_order)
                passed.append(cursor)
                self._open(cursor.group, cursors)
            else:
                break
        for each in passed:
            heappush(each.group.in_order, each.entry)
        for ranked in opened:
            heappush(self._by_value, ranked)
        return found

    def copy_changed(self, block_id: int) -> None:
        group = self._group_of.get(block_id)
        if group is not None and self._has_copy(block_id) is not group.has_copy:
            position, number, _ = group.entries[block_id]
            self.remove(block_id)
            self._add(group.owner, (position, number, block_id))  # the old entry may still be in its heap

    def changed(self, owner: ContentOwner) -> None:
        for has_copy in (False, True):
            group = self._groups.get((owner, has_copy))
            if group is not None:
                self._assess(group)

    def ids(self) -> list[int]:
        return list(self._group_of)

    # -- inside ------------------------------------------------------------------------------------------------

    def _add(self, owner: ContentOwner | None, entry: _Entry) -> None:
        key = (owner, self._has_copy(entry[2]))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(owner, has_copy=key[1])
        group.add(entry)
        self._group_of[entry[2]] = group
        if len(group.entries) == 1:
            self._assess(group)
        elif group.first() is entry:
            self._rank(group)

    def _value(self, group: _Group, entry: _Entry) -> float:
        return group.rate * self._saved_s(-entry[0], group.has_copy)

    def _open(self, group: _Group, cursors: list[_NextContent]) -> None:
        entry = group.first()
        if entry is not None:
            heappush(cursors, _NextContent(self._value(group, entry), next(self._numbers), entry, group))

    def _assess(self, group: _Group) -> None:
        """Compute the chance of an owner's return anew."""
        group.rate = self._return_rate(group.owner)
        self._rank(group)
        at_s = None if group.owner is None else group.owner.end_of_bin_s
        if at_s is not None and at_s != group.next_at_s:
            heappush(self._next_bins, (at_s, next(self._numbers), group))
        group.next_at_s = at_s
        if len(self._next_bins) > 2 * len(self._groups) + MIN_OLD_ENTRIES:
            valid = {id(entry[2]): entry for entry in self._next_bins if entry[0] == entry[2].next_at_s}
            self._next_bins = list(valid.values())
            heapify(self._next_bins)

    def _rank(self, group: _Group) -> None:
        """Enter a group into the heap by the value of its next content."""
        entry = group.first()
        if entry is None:
            raise AssertionError("a group without content has no rank")
        group.number = next(self._numbers)
        heappush(self._by_value, (self._value(group, entry), group.number, group))
        if len(self._by_value) > 2 * len(self._groups) + MIN_OLD_ENTRIES:
            self._by_value = [ranked for ranked in self._by_value if ranked[1] == ranked[2].number]
            heapify(self._by_value)

    def _lowest(self) -> tuple[float, int, _Group] | None:
        """Return the entry of the group with the lowest value."""
        while self._by_value and self._by_value[0][1] != self._by_value[0][2].number:
            heappop(self._by_value)
        return self._by_value[0] if self._by_value else None

    def _assess_changed(self) -> None:
        """Compute the chances anew of owners whose pauses have reached a new bin."""
        now_s = self._clock()
        while self._next_bins and self._next_bins[0][0] <= now_s:
            at_s, _, group = heappop(self._next_bins)
            if at_s == group.next_at_s:
                self._assess(group)
