"""The sources of copies to a slower tier: blocks that are being copied, content that was reused, and
listeners."""

from collections.abc import Iterable
from typing import Protocol

from baton.core.kv.block_hash import BlockHash
from baton.engine.state.require import require


class PoolListener(Protocol):
    """Follows the content of a pool. Its methods may read the pool, but must not change it."""

    def became_idle(self, block_id: int) -> None:
        """Handle that a block with content is no longer in use."""
        ...

    def withdrawn(self, block_hash: BlockHash) -> None:
        """Handle that content may be wrong. Copies of it must not be used."""
        ...


class CopySources:
    """The blocks that are being copied out, the content that was reused, and the listeners of one pool.

    copying: blocks that must not be reallocated, because copies read them, and how many do. Used or idle.
    """

    def __init__(self) -> None:
        self.copying: dict[int, int] = {}
        self._reused: set[int] = set()
        self._listeners: list[PoolListener] = []

    def add_listener(self, listener: PoolListener) -> None:
        self._listeners.append(listener)

    def is_reused(self, block_id: int) -> bool:
        """Return True if a second request has found the block's content."""
        return block_id in self._reused

    def mark_reused(self, block_id: int) -> None:
        """Record that a second request has found the block's content."""
        self._reused.add(block_id)

    def forget_content(self, block_id: int) -> None:
        """Record that the block's content is gone."""
        self._reused.discard(block_id)

    def became_idle(self, block_id: int) -> None:
        """Tell the listeners that a block with content is no longer in use."""
        for listener in self._listeners:
            listener.became_idle(block_id)

    def withdrawn(self, block_hash: BlockHash) -> None:
        """Tell the listeners that content may be wrong."""
        for listener in self._listeners:
            listener.withdrawn(block_hash)

    def begin_copy(self, block_id: int) -> None:
        """Record that one more copy reads the block."""
        self.copying[block_id] = self.copying.get(block_id, 0) + 1

    def end_copy(self, block_ids: Iterable[int]) -> None:
        """Record that one copy of each block has ended. Raises KeyError for a block that is not copied."""
        for block_id in block_ids:
            self.copying[block_id] -= 1
            if not self.copying[block_id]:
                del self.copying[block_id]

    def check(self, contents: set[int]) -> None:
        """Check against the blocks that have content. Raises AssertionError."""
        require(self._reused <= contents, "a block without content was reused")
