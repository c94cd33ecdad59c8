"""Sets the order in which a worker's tiers evict content, and how much of it clients can retain."""

from collections.abc import Callable

from baton.core.kv.block_hash import BlockHash
from baton.core.step_cost import StepCostModel
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.retention.content_owners import ContentOwners
from baton.engine.retention.eviction_order import EvictionOrder, LruOrder, ReuseLruOrder
from baton.engine.retention.retaining_order import RetainingOrder
from baton.engine.retention.value_order import SavedSeconds, ValueOrder
from baton.engine.tiers.copy_policy import block_compute_s
from baton.engine.tiers.slots import FIRST_USE_SHARE
from baton.worker.tiers.host_tier import HostTier

RETAINED_SHARE = 0.1
"""Share of a tier that each tenant can retain if `kv_retain_memory` is not set."""
MIN_SAVED_SHARE = 0.01
"""A reload saves at least this share of the time to compute a block, so that chances still count."""


class Retention:
    """The owners of the content of one worker, and the order of eviction of each tier. A `PoolListener`.

    device, host: the orders. host is None without a host tier.
    """

    def __init__(
        self,
        pool: BlockPool,
        tier: HostTier | None,
        *,
        policy: str,
        retain_memory: int | None,
        block_bytes: int,
        chunk_tokens: int,
        costs: Callable[[], StepCostModel | None],
        clock: Callable[[], float],
    ) -> None:
        """Set the orders of an empty pool and tier.

        policy: `value` or `lru`.
        retain_memory: bytes of each tier that a tenant can retain; None: a share of it.
        block_bytes: of one device block. chunk_tokens: most tokens of a step. costs: of the worker's steps.
        """
        self.owners = ContentOwners(clock)
        self._pool, self._tier = pool, tier
        self._chunk_tokens, self._costs = chunk_tokens, costs
        self._policy, self._retain_memory, self._clock = policy, retain_memory, clock
        self.device = self._order(pool.num_blocks, block_bytes, LruOrder(), self._saved_on_device_s, self._is_in_host)
        pool.order_by(self.device)
        self.host: RetainingOrder | None = None
        if tier is not None:
            num_slots = tier.slots.num_slots
            lru = ReuseLruOrder(num_slots, FIRST_USE_SHARE)
            self.host = self._order(num_slots, tier.block_bytes, lru, self._saved_in_host_s, self._is_on_device)
            tier.slots.order_by(self.host)
            tier.slots.on_forgotten(self._left_host)
            pool.on_forgotten(tier.slots.copy_changed)
            pool.add_listener(self)
        for order in (self.device, self.host):
            if order is not None:
                self.owners.on_change(order.changed)

    def tenant_blocks(self, num_blocks: int, block_bytes: int) -> int:
        """Return how many blocks of a tier with `num_blocks` each tenant can retain."""
        if self._retain_memory is None:
            return int(RETAINED_SHARE * num_blocks)
        return self._retain_memory // block_bytes

    def became_idle(self, block_id: int) -> None:
        """Record that the host tier's copy is the second one."""
        if self._tier is not None:
            self._tier.slots.copy_changed(self._pool.hash_of(block_id))

    def withdrawn(self, block_hash: BlockHash) -> None:
        """Do nothing: the tier drops its copy itself."""

    def _order(
        self,
        size: int,
        block_bytes: int,
        lru: EvictionOrder,
        saved_s: SavedSeconds,
        has_copy: Callable[[int], bool],
    ) -> RetainingOrder:
        inner = lru
        if self._policy == "value":
            inner = ValueOrder(
                clock=self._clock, return_rate=self.owners.return_rate, saved_s=saved_s, has_copy=has_copy
            )
        return RetainingOrder(inner, clock=self._clock, size=size, tenant_blocks=self.tenant_blocks(size, block_bytes))

    def _saved_on_device_s(self, position: int, has_copy: bool) -> float:
        """Return what a device block saves: computing it, or reloading it if the host tier has it."""
        compute_s = self._compute_s(position)
        return min(compute_s, self._load_s(compute_s)) if has_copy else compute_s

    def _saved_in_host_s(self, position: int, has_copy: bool) -> float:
        """Return what a slot saves: computing its block instead of reloading it.

        While the device has the block, that is as little as the reload: the device would keep it.
        """
        compute_s = self._compute_s(position)
        load_s = self._load_s(compute_s)
        return min(load_s, compute_s) if has_copy else max(compute_s - load_s, MIN_SAVED_SHARE * compute_s)

    def _load_s(self, compute_s: float) -> float:
        load_s = 0.0 if self._tier is None else self._tier.load_s(1) or 0.0
        return max(load_s, MIN_SAVED_SHARE * compute_s)

    def _is_in_host(self, block_id: int) -> bool:
        return self._tier is not None and self._tier.holds(self._pool.hash_of(block_id))

    def _is_on_device(self, slot: int) -> bool:
        return self._tier is not None and self._pool.find(self._tier.slots.hash_of(slot)) is not None

    def _left_host(self, block_hash: BlockHash) -> None:
        block_id = self._pool.find(block_hash)
        if block_id is not None:
            self._pool.copy_changed(block_id)

    def _compute_s(self, position: int) -> float:
        costs = self._costs()
        if costs is None:
            return 1.0
        return block_compute_s(costs, self._pool.block_size_tokens, self._chunk_tokens, num_before=position)
