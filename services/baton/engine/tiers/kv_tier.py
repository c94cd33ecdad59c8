"""`KvTier`: the interface of a slower memory in which one worker keeps copies of KV blocks, by hash."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_events import KvEventKind, Tier
from baton.engine.retention.content_owner import NO_USE, ContentUse


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockToStore:
    """A device block to copy out.

    block_hash: of its content, see `core.kv.block_hash.table_hash`
    is_announced: schedulers are informed about the content
    is_reused: a second request has used the content
    tenant_root: of the tenant whose content it is, see `core.kv.block_hash.tenant_root`; NO_HASH if unknown
    use: its last use, from which the order of eviction may follow
    """

    block_id: int
    block_hash: BlockHash
    is_announced: bool = True
    is_reused: bool = False
    tenant_root: BlockHash = NO_HASH
    use: ContentUse = NO_USE


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """The slots of a tier by state. Each slot is in exactly one state.

    held: has content. busy: is being written, or has lost its content while it is still read.
    """

    total: int
    free: int
    held: int
    busy: int


class KvTier(Protocol):
    """Copies of device blocks, found by hash.

    Used from one event loop. `store` and `load` wait for the copies, which run in another thread; no other
    method waits. `load` uses content only if the slot's generation and hash, read after the copy, are those
    of the content that was asked for.
    """

    @property
    def tier(self) -> Tier:
        """The kind of memory."""
        ...

    @property
    def stores_busy_s(self) -> float:
        """Seconds so far in which stores used memory bandwidth or cores that steps need. Waits for a disk do
        not count."""
        ...

    @property
    def answers(self) -> bool:
        """False while reads of a disk do not end. Nothing is loaded then, and nothing should be planned."""
        ...

    @property
    def store_pause_s(self) -> float:
        """Seconds until the next store may succeed after one that failed: 0 if it may now, infinite if none
        will. `store` copies nothing meanwhile."""
        ...

    def counts(self) -> TierCounts:
        """Return the number of slots in each state."""
        ...

    def holds(self, block_hash: BlockHash) -> bool:
        """Return True if the tier has the content."""
        ...

    def load_s(self, num_blocks: int) -> float | None:
        """Return the predicted time to load blocks, from measured copies; None before the first."""
        ...

    @property
    def load_block_s(self) -> float | None:
        """Predicted time that one more block adds to a load; None before the first copy."""
        ...

    def store_s(self, num_blocks: int) -> float | None:
        """Return the predicted time to store blocks, from measured copies; None before the first."""
        ...

    async def store(self, blocks: Sequence[BlockToStore]) -> int:
        """Copy blocks into the tier and return how many were copied.

        Blocks are left out if the tier has their content already or no slot is free. The caller keeps the
        blocks from being written until the call has returned. Raises nothing: a failed copy stores nothing.
        """
        ...

    async def load(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[int], *, within_s: float | None = None
    ) -> int:
        """Copy content into own blocks. Returns how many leading ones were copied and verified.

        The other blocks hold no valid content. Even if the caller is cancelled, the copy ends before the call
        does, unless the device has failed. Raises nothing: content that cannot be read is not loaded.

        within_s: what a disk has not read by then is not loaded, so that one that does not answer keeps no
            blocks; None sets no limit
        """
        ...

    def count_use(self, block_hash: BlockHash) -> None:
        """Record that a request has found the content on the device: it is evicted last. Unknown content is
        ignored."""
        ...

    def announce(self, block_hash: BlockHash) -> None:
        """Announce content to schedulers, also while it is being copied. Unknown content is ignored."""
        ...

    def discard(self, block_hash: BlockHash) -> None:
        """Drop content that may be wrong, also while it is being copied. Unknown content is ignored."""
        ...

    async def erase_tenant(self, tenant_root: BlockHash) -> int:
        """Drop all content of a tenant, or of one that is not known, and return how many blocks had any.

        The bytes on a disk are overwritten. Raises OSError if the disk does not allow that.
        """
        ...

    def announced_hashes(self) -> list[BlockHash]:
        """Return the hashes of all announced content, for a snapshot."""
        ...

    def take_events(self) -> list[tuple[KvEventKind, BlockHash]]:
        """Return the net changes of announced content since the last call."""
        ...

    async def aclose(self) -> None:
        """Wait for running copies, then release the memory."""
        ...


def num_held(tier: KvTier, hashes: Iterable[BlockHash]) -> int:
    """Return how many leading hashes the tier holds."""
    count = 0
    for block_hash in hashes:
        if not tier.holds(block_hash):
            break
        count += 1
    return count
