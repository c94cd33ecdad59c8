"""`EvictionOrder`: the interface of the order in which idle content is evicted, and the least recently used
order."""

from collections import OrderedDict
from collections.abc import Iterable, Set
from itertools import islice
from math import ceil
from typing import Protocol

from baton.engine.retention.content_owner import ContentOwner, ContentUse

NOTHING: Set[int] = frozenset()


class EvictionOrder(Protocol):
    """The idle content of one tier in the order of eviction, by block or slot.

    Each operation takes logarithmic time. Content is put in the reverse order of its chain, so that a chain
    is evicted from its end.
    """

    def __len__(self) -> int: ...

    def __contains__(self, block_id: object) -> bool: ...

    def put(self, block_id: int, use: ContentUse) -> None:
        """Add content that has become idle."""
        ...

    def remove(self, block_id: int) -> None:
        """Remove content that is used, or gone. Raises KeyError if it is not here."""
        ...

    def first(self, count: int, excluded: Set[int] = NOTHING) -> list[int]:
        """Return what is evicted next, at most `count` of it, without `excluded`. Nothing is removed."""
        ...

    def copy_changed(self, block_id: int) -> None:
        """Record that another tier has a copy of this content now, or has none any more."""
        ...

    def changed(self, owner: ContentOwner) -> None:
        """Record that the chance of an owner's return, or its retention, has changed."""
        ...

    def ids(self) -> list[int]:
        """Return all blocks or slots, for checks."""
        ...


class LruOrder:
    """The least recently used content first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._idle

    def put(self, block_id: int, use: ContentUse) -> None:
        self._idle[block_id] = None

    def remove(self, block_id: int) -> None:
        del self._idle[block_id]

    def first(self, count: int, excluded: Set[int] = NOTHING) -> list[int]:
        return first_of(self._idle, count, excluded)

    def last(self, count: int) -> list[int]:
        """Return what is evicted last, at most `count` of it, the last first."""
        return list(islice(reversed(self._idle), max(0, count)))

    def copy_changed(self, block_id: int) -> None:
        """Do nothing: copies do not matter."""

    def changed(self, owner: ContentOwner) -> None:
        """Do nothing: owners do not matter."""

    def ids(self) -> list[int]:
        return list(self._idle)


class ReuseLruOrder:
    """Content that no second request has used first, as long as it has more than a share of the tier, then
    other content. Within each group the least recently used comes first.

    Content that is never used again thus does not displace what is, and new content still finds a place.
    """

    def __init__(self, size: int, first_use_share: float) -> None:
        """Create an empty order.

        size: blocks of the tier. first_use_share: share of them that content without a second use keeps.
        """
        self._most_once = first_use_share * size
        self._once, self._reused = LruOrder(), LruOrder()

    def __len__(self) -> int:
        return len(self._once) + len(self._reused)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._once or block_id in self._reused

    def put(self, block_id: int, use: ContentUse) -> None:
        (self._reused if use.is_reused else self._once).put(block_id, use)

    def remove(self, block_id: int) -> None:
        (self._once if block_id in self._once else self._reused).remove(block_id)

    def first(self, count: int, excluded: Set[int] = NOTHING) -> list[int]:
        once = self._once.first(count, excluded)
        surplus = max(0, ceil(len(self._once) - self._most_once))
        return [*once[:surplus], *self._reused.first(count, excluded), *once[surplus:]][:count]

    def last(self, count: int) -> list[int]:
        """Return at most `count` blocks: those with a second use, then others, each time the last first."""
        reused = self._reused.last(count)
        return reused + self._once.last(count - len(reused))

    def copy_changed(self, block_id: int) -> None:
        """Do nothing: copies do not matter."""

    def changed(self, owner: ContentOwner) -> None:
        """Do nothing: owners do not matter."""

    def ids(self) -> list[int]:
        return [*self._once.ids(), *self._reused.ids()]


def first_of(block_ids: Iterable[int], count: int, excluded: Set[int]) -> list[int]:
    """Return the first `count` of some blocks that are not excluded."""
    return list(islice((each for each in block_ids if each not in excluded), count))
