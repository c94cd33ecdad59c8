"""Evicts the content first that is expected to save the fewest seconds for the time that it is kept.

The value of a block is the seconds that its next use saves, times the chance that its owner returns, per
second for which it is kept until then (`ContentOwners.return_rate`). Content that another tier has, too, can
be evicted before all other content.
"""

from collections.abc import Callable, Sequence, Set
from heapq import heapify, heappop, heappush, nlargest
from itertools import count
from typing import NamedTuple

from baton.engine.retention.content_owner import ContentOwner, ContentUse
from baton.engine.retention.eviction_order import NOTHING

ContentValue = Callable[[float, int, bool, bool], float]
"""(chance of a use per second, position in the chain, whether another tier has a copy, whether a request of
the owner runs) -> value of a block."""

MIN_OLD_ENTRIES = 64
"""Outdated entries of a heap are dropped once there are so many more of them than others."""

MAX_OWNERS = 64
"""Owners whose content `first_without_copy` looks at."""

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


_Ranked = tuple[float, int, _Group]
"""Value of what a group loses next, number, group."""


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
    next. Chances change with time only when a pause reaches its next bin, for which there is another heap.
    Each operation therefore takes logarithmic time, if the bins of a pause are not counted.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        return_rate: Callable[[ContentOwner | None], float],
        value: ContentValue,
        has_copy: Callable[[int], bool],
        kept_copies: int | None = None,
    ) -> None:
        """has_copy: returns True if another tier has a copy of the content of a block or slot.

        kept_copies: content with a copy is evicted after all other, but what exceeds this number before it;
            None: all content is evicted by its value.
        """
        self._clock, self._return_rate = clock, return_rate
        self._value_of, self._has_copy, self._kept_copies = value, has_copy, kept_copies
        self._groups: dict[tuple[ContentOwner | None, bool], _Group] = {}
        self._group_of: dict[int, _Group] = {}
        self._num_copied = 0
        self._by_value: dict[bool, list[_Ranked]] = {False: [], True: []}  # heaps, by whether there is a copy
        self._next_bins: list[tuple[float, int, _Group]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._group_of

    @property
    def num_copied(self) -> int:
        """Amount of idle content of which another tier has a copy."""
        return self._num_copied

    def put(self, block_id: int, use: ContentUse) -> None:
        self._add(use.owner, (-use.position, next(self._numbers), block_id))

    def remove(self, block_id: int) -> None:
        group = self._group_of.pop(block_id)
        entry = group.entries[block_id]
        was_next = group.first() is entry
        del group.entries[block_id]
        self._num_copied -= group.has_copy
        if not group.entries:
            del self._groups[group.owner, group.has_copy]
            group.number, group.next_at_s = -1, None
        elif was_next:
            self._rank(group)

    def first(self, count: int, excluded: Set[int] = NOTHING) -> list[int]:
        if self._kept_copies is None:
            return self._first_of((False, True), count, excluded)
        surplus = self._first_of((True,), min(count, self._num_copied - self._kept_copies), excluded)
        alone = self._first_of((False,), count - len(surplus), excluded)
        if (num_left := count - len(surplus) - len(alone)) <= 0:
            return surplus + alone
        return surplus + alone + self._first_of((True,), len(surplus) + num_left, excluded)[len(surplus) :]

    def first_without_copy(self, count: int, above_rate: float) -> list[int]:
        """Return content that no other tier has, of the owners whose content is evicted next.

        Each chain is returned from its beginning, without which the rest of it is of no use.
        above_rate: owners whose chance of return per second is not above it, or is 0, are left out. The
            content of at most `MAX_OWNERS` is looked at.
        """
        self._assess_changed()
        found: list[int] = []
        opened: list[_Ranked] = []
        while len(found) < count and len(opened) < MAX_OWNERS and (top := self._lowest((False,))) is not None:
            opened.append(heappop(self._by_value[False]))
            if top[2].rate > max(0.0, above_rate):
                found += [entry[2] for entry in nlargest(count - len(found), top[2].entries.values())]
        for ranked in opened:
            heappush(self._by_value[False], ranked)
        return found

    def rate_of(self, block_id: int) -> float | None:
        """Return the chance per second that the owner of content returns; None if it is not in this order."""
        group = self._group_of.get(block_id)
        return None if group is None else group.rate

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
        self._num_copied += group.has_copy
        if len(group.entries) == 1:
            self._assess(group)
        elif group.first() is entry:
            self._rank(group)

    def _first_of(self, kinds: Sequence[bool], count: int, excluded: Set[int]) -> list[int]:
        """Return what is evicted next of the content with a copy, without one, or both."""
        self._assess_changed()
        found: list[int] = []
        opened: list[_Ranked] = []
        passed: list[_NextContent] = []
        cursors: list[_NextContent] = []
        while len(found) < count:
            top = self._lowest(kinds)
            if top is not None and (not cursors or top[0] <= cursors[0].value):
                opened.append(heappop(self._by_value[top[2].has_copy]))
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
            heappush(self._by_value[ranked[2].has_copy], ranked)
        return found

    def _value(self, group: _Group, entry: _Entry) -> float:
        is_running = group.owner is not None and group.owner.num_running > 0
        return self._value_of(group.rate, -entry[0], group.has_copy, is_running)

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
        heap = self._by_value[group.has_copy]
        heappush(heap, (self._value(group, entry), group.number, group))
        if len(heap) > 2 * len(self._groups) + MIN_OLD_ENTRIES:
            heap[:] = [ranked for ranked in heap if ranked[1] == ranked[2].number]
            heapify(heap)

    def _lowest(self, kinds: Sequence[bool]) -> _Ranked | None:
        """Return the entry of the group of these kinds with the lowest value."""
        lowest: _Ranked | None = None
        for kind in kinds:
            heap = self._by_value[kind]
            while heap and heap[0][1] != heap[0][2].number:
                heappop(heap)
            if heap and (lowest is None or heap[0] < lowest):
                lowest = heap[0]
        return lowest

    def _assess_changed(self) -> None:
        """Compute the chances anew of owners whose pauses have reached a new bin."""
        now_s = self._clock()
        while self._next_bins and self._next_bins[0][0] <= now_s:
            at_s, _, group = heappop(self._next_bins)
            if at_s == group.next_at_s:
                self._assess(group)
