"""The order in which idle blocks are reallocated, and the set of replicas.

A replica is content that was pulled from another worker, which probably still has it.
"""

from collections import OrderedDict
from collections.abc import Set
from itertools import islice

from baton.engine.retention.content_owner import NO_USE, ContentUse
from baton.engine.retention.eviction_order import EvictionOrder, LruOrder, first_of
from baton.engine.state.require import require


class EvictionQueue:
    """Idle blocks in the order of reallocation: free blocks, then idle replicas, then other cached blocks.

    Free blocks and replicas are reallocated in the order in which they became idle, other cached blocks in
    that of an `EvictionOrder`. A block is a replica from the time when it is being received until a second
    request has used it or its content is gone.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._idle_replicas: OrderedDict[int, None] = OrderedDict()
        self._cached: EvictionOrder = LruOrder()
        self._replicas: dict[int, bool] = {}  # replica, idle or in use -> True after its first use

    def order_by(self, order: EvictionOrder) -> None:
        """Evict cached blocks in this order from now on. Raises ValueError if there are some."""
        if len(self._cached) or len(order):
            raise ValueError("the order of eviction cannot change while blocks are cached")
        self._cached = order

    def first(self, num_blocks: int, excluded: Set[int]) -> list[int]:
        """Return what is reallocated next, at most `num_blocks`, without `excluded`."""
        found = first_of(self._free, num_blocks, excluded)
        found += first_of(self._idle_replicas, num_blocks - len(found), excluded)
        return found + self._cached.first(num_blocks - len(found), excluded) if len(found) < num_blocks else found

    def __len__(self) -> int:
        return self.num_free + self.num_cached

    @property
    def num_free(self) -> int:
        """Number of idle blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of idle blocks with content, replicas included."""
        return len(self._idle_replicas) + len(self._cached)

    @property
    def num_replicas(self) -> int:
        """Number of replicas, including those in use and those that are being received."""
        return len(self._replicas)

    @property
    def num_idle_replicas(self) -> int:
        """Number of replicas that are idle."""
        return len(self._idle_replicas)

    def is_free(self, block_id: int) -> bool:
        """Return True if the block is idle and has no content."""
        return block_id in self._free

    def put(self, block_id: int, use: ContentUse | None) -> None:
        """Add a block that has become idle. `use`: of its content; None if it has none."""
        if use is None:
            self._free[block_id] = None
        elif block_id in self._replicas:
            self._idle_replicas[block_id] = None
        else:
            self._cached.put(block_id, use)

    def take(self, block_id: int) -> None:
        """Remove a block that will be used. Raises ValueError if it is not idle."""
        for blocks in (self._free, self._idle_replicas):
            if block_id in blocks:
                del blocks[block_id]
                return
        if block_id not in self._cached:
            raise ValueError(f"block {block_id} is not idle")
        self._cached.remove(block_id)

    def copy_changed(self, block_id: int) -> None:
        """Record that another tier has a copy of a block's content now, or has none any more."""
        self._cached.copy_changed(block_id)

    def mark_replica(self, block_id: int) -> None:
        """Mark a receiving block as a replica."""
        self._replicas[block_id] = False

    def is_replica(self, block_id: int) -> bool:
        """Return True if the block is a replica, idle or not."""
        return block_id in self._replicas

    def unmark_replica(self, block_id: int) -> None:
        """Remove the replica mark of a block whose content is gone or will not arrive, if it has one."""
        self._replicas.pop(block_id, None)

    def count_use(self, block_id: int, use: ContentUse = NO_USE) -> None:
        """Count a request that found the block in the cache. The second use removes its mark as a replica.

        use: of its content
        """
        was_used = self._replicas.get(block_id)
        if was_used is None:
            return
        if not was_used:
            self._replicas[block_id] = True
            return
        del self._replicas[block_id]
        if block_id in self._idle_replicas:
            del self._idle_replicas[block_id]
            self._cached.put(block_id, use)

    def oldest_replicas(self, max_blocks: int) -> list[int]:
        """Return at most `max_blocks` idle replicas, least recently used first."""
        return list(islice(self._idle_replicas, max_blocks))

    def check(self, *, idle: set[int], contents: set[int], incoming: set[int]) -> None:
        """Check the queue against the pool. Raises AssertionError naming the first violation.

        idle: blocks that are not in use.
        contents: blocks, idle or not, whose content is known by hash.
        incoming: blocks that are receiving or quarantined.
        """
        require(self._free.keys() == idle - contents, "the free blocks are not exactly the idle blocks without content")
        require(
            self._idle_replicas.keys() == idle & contents & self._replicas.keys(),
            "the queued replicas are not exactly the idle replicas with content",
        )
        require(
            sorted(self._cached.ids()) == sorted((idle & contents) - self._replicas.keys()),
            "the cached blocks are not exactly the other idle blocks with content",
        )
        require(self._replicas.keys() <= contents | incoming, "a replica has no content and is not being received")
