"""Evicts what clients have asked to retain last, within a budget for each tenant.

Retention is no pin: if nothing else is idle, retained content is evicted, too.
"""

from collections.abc import Callable, Set
from heapq import heapify, heappop, heappush
from itertools import count

from baton.engine.retention.content_owner import ContentOwner, ContentUse
from baton.engine.retention.eviction_order import NOTHING, EvictionOrder, first_of

MAX_RETAINED_SHARE = 0.5
"""Largest share of a tier's blocks that all tenants together can retain."""
MIN_OLD_ENTRIES = 64
"""Outdated ends of retention are dropped once there are so many more of them than others."""


class RetainingOrder:
    """Implements `EvictionOrder` over another order, for content that is not retained.

    Of an owner's content as much is retained as its tenant has left of its budget, from the beginning of its
    chains. What was retained first is evicted first.
    """

    def __init__(self, inner: EvictionOrder, *, clock: Callable[[], float], size: int, tenant_blocks: int) -> None:
        """Create an empty order.

        size: blocks of the tier. tenant_blocks: how many of them each tenant can retain.
        """
        self._inner, self._clock = inner, clock
        self._tenant_blocks, self._max_blocks = tenant_blocks, int(MAX_RETAINED_SHARE * size)
        self._retained: dict[int, ContentUse] = {}
        self._by_owner: dict[ContentOwner, dict[int, None]] = {}
        self._by_tenant: dict[str, int] = {}
        self._ends: list[tuple[float, int, ContentOwner]] = []  # a heap: when retention may end
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._inner) + len(self._retained)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._retained or block_id in self._inner

    @property
    def num_retained(self) -> int:
        """Number of idle blocks that are retained."""
        self._end_retention()
        return len(self._retained)

    def num_of_tenant(self, tenant: str) -> int:
        """Return the number of idle blocks that a tenant retains."""
        return self._by_tenant.get(tenant, 0)

    def put(self, block_id: int, use: ContentUse) -> None:
        owner = use.owner
        if owner is None or not owner.is_retained or not self._has_budget(owner):
            self._inner.put(block_id, use)
            return
        if owner not in self._by_owner:
            self._by_owner[owner] = {}
            self._end_later(owner)
        self._retained[block_id] = use
        self._by_owner[owner][block_id] = None
        self._by_tenant[owner.tenant] = self._by_tenant.get(owner.tenant, 0) + 1

    def remove(self, block_id: int) -> None:
        if block_id in self._retained:
            self._drop(block_id)
        else:
            self._inner.remove(block_id)

    def first(self, count: int, excluded: Set[int] = NOTHING) -> list[int]:
        self._end_retention()
        found = self._inner.first(count, excluded)
        return found + first_of(self._retained, count - len(found), excluded)

    def copy_changed(self, block_id: int) -> None:
        self._inner.copy_changed(block_id)

    def changed(self, owner: ContentOwner) -> None:
        self._inner.changed(owner)
        if owner in self._by_owner:
            self._end_later(owner)
            self._end_if_due(owner)

    def ids(self) -> list[int]:
        return [*self._inner.ids(), *self._retained]

    # -- inside ------------------------------------------------------------------------------------------------

    def _has_budget(self, owner: ContentOwner) -> bool:
        """Return True if one more block can be retained, perhaps instead of a later one of the owner."""
        if self.num_of_tenant(owner.tenant) < self._tenant_blocks and len(self._retained) < self._max_blocks:
            return True
        last = next(iter(self._by_owner.get(owner, ())), None)
        if last is None:
            return False
        self._move(last)
        return True

    def _drop(self, block_id: int) -> ContentUse:
        use = self._retained.pop(block_id)
        owner = use.owner
        assert owner is not None
        del self._by_owner[owner][block_id]
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        self._by_tenant[owner.tenant] -= 1
        if not self._by_tenant[owner.tenant]:
            del self._by_tenant[owner.tenant]
        return use

    def _move(self, block_id: int) -> None:
        self._inner.put(block_id, self._drop(block_id))

    def _end_later(self, owner: ContentOwner) -> None:
        """Look at an owner again when its retention ends. While it runs, the end is not known yet."""
        if not owner.num_retaining:
            heappush(self._ends, (owner.retained_until_s, next(self._numbers), owner))
        if len(self._ends) > 2 * len(self._by_owner) + MIN_OLD_ENTRIES:
            self._ends = [(each.retained_until_s, next(self._numbers), each) for each in self._by_owner]
            heapify(self._ends)

    def _end_retention(self) -> None:
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            self._end_if_due(heappop(self._ends)[2])

    def _end_if_due(self, owner: ContentOwner) -> None:
        if not owner.is_retained:
            for block_id in list(self._by_owner.get(owner, ())):
                self._move(block_id)
