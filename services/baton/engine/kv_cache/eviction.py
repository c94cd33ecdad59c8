"""Which of the blocks that nobody uses is handed out next, and which blocks are copies: the worker that they
came from has them, too."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from baton.engine.state.require import require


class EvictionQueue:
    """Free blocks first, the longest free one ahead; then idle copies, and then what else is cached, the
    least recently used one ahead.

    A block is marked as a copy while it is on its way here, and from then on until a second request has used
    it or its content is gone.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._copies: dict[int, bool] = {}  # idle or not -> whether a request has used it here

    def __iter__(self) -> Iterator[int]:
        return chain(self._free, self._cold, self._cached)

    def __len__(self) -> int:
        return self.num_free + self.num_cached

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cold) + len(self._cached)

    @property
    def num_copies(self) -> int:
        """Also those in use, and those on their way."""
        return len(self._copies)

    @property
    def num_cold(self) -> int:
        """Idle copies."""
        return len(self._cold)

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def put(self, block_id: int, *, has_content: bool) -> None:
        """Nobody uses it any more."""
        if not has_content:
            self._free[block_id] = None
        elif block_id in self._copies:
            self._cold[block_id] = None
        else:
            self._cached[block_id] = None

    def take(self, block_id: int) -> None:
        """Somebody uses it from now on."""
        for blocks in (self._free, self._cached, self._cold):
            if block_id in blocks:
                del blocks[block_id]
                return
        raise ValueError(f"block {block_id} is not idle")

    def mark_copy(self, block_id: int) -> None:
        self._copies[block_id] = False

    def end_copy(self, block_id: int) -> None:
        """Its content is gone, or will not come. Nothing if it is no copy."""
        self._copies.pop(block_id, None)

    def count_use(self, block_id: int) -> None:
        """A request has found it here. Nothing if it is no copy."""
        was_used = self._copies.get(block_id)
        if was_used is None:
            return
        if not was_used:
            self._copies[block_id] = True
            return
        del self._copies[block_id]
        if block_id in self._cold:
            del self._cold[block_id]
            self._cached[block_id] = None

    def coldest(self, max_blocks: int) -> list[int]:
        """At most so many idle copies, in order."""
        return list(islice(self._cold, max_blocks))

    def check(self, *, idle: set[int], contents: set[int], coming: set[int]) -> None:
        """Raises AssertionError naming the first invariant that does not hold. `idle`: blocks that nobody
        uses; `contents`: blocks, idle or not, whose content is known by hash; `coming`: blocks that are being
        read into."""
        require(self._free.keys() == idle - contents, "the idle blocks without content are not exactly the free ones")
        require(
            self._cold.keys() == idle & contents & self._copies.keys(),
            "the idle copies with content are not exactly the cold ones",
        )
        require(
            self._cached.keys() == (idle & contents) - self._copies.keys(),
            "the other idle ones are not exactly the cached ones",
        )
        require(self._copies.keys() <= contents | coming, "a copy has no content, and none is coming")
