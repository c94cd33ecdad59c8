"""Follows what one worker stores in its tiers and evicts from all of them."""

from collections.abc import Sequence

from baton.core.kv.block_hash import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.retention.evicted_reuse import EvictedReuse
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.host_tier import HostTier


class EvictedKv:
    """Measures how much evicted KV is computed again.

    Content is evicted when the last tier that has it needs its place. Withdrawn content is not evicted.
    """

    def __init__(self, pool: BlockPool, tiers: Sequence[HostTier | DiskTier]) -> None:
        """Follow an empty pool, and the tiers below it."""
        self._pool, self._tiers = pool, tiers
        self._reuse = EvictedReuse(pool.num_blocks + sum(tier.counts().total for tier in tiers))
        pool.on_stored(self._stored)
        pool.on_evicted(self._evicted)
        for tier in tiers:
            tier.slots.on_evicted(self._evicted)

    @property
    def reused_share(self) -> float:
        """Evicted blocks that are computed again, per block that is stored."""
        return self._reuse.share

    def _stored(self, block_hash: BlockHash, is_computed: bool) -> None:
        if not self._is_in_a_slower_tier(block_hash):
            self._reuse.stored(block_hash, is_computed=is_computed)

    def _evicted(self, block_hash: BlockHash) -> None:
        if self._pool.find(block_hash) is None and not self._is_in_a_slower_tier(block_hash):
            self._reuse.evicted(block_hash)

    def _is_in_a_slower_tier(self, block_hash: BlockHash) -> bool:
        return any(tier.holds(block_hash) for tier in self._tiers)
