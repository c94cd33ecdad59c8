"""Sets the order in which a worker's tiers evict content, and how much of it clients can retain.

With the order by value, the device and the host tier together hold as much content as they can: what both
hold is copied late, and evicted first.
"""

from collections.abc import Callable
from math import inf

from baton.core.kv.block_hash import BlockHash
from baton.core.step_cost import StepCostModel
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.retention.content_owners import ContentOwners
from baton.engine.retention.eviction_order import EvictionOrder, LruOrder, ReuseLruOrder
from baton.engine.retention.retaining_order import RetainingOrder
from baton.engine.retention.value_order import ContentValue, ValueOrder
from baton.engine.tiers.copy_policy import block_compute_s
from baton.engine.tiers.slots import FIRST_USE_SHARE
from baton.worker.tiers.host_tier import HostTier

RETAINED_SHARE = 0.1
"""Share of a tier that each tenant can retain if `kv_retain_memory` is not set."""
MIN_SAVED_SHARE = 0.01
"""A reload saves at least this share of the time to compute a block, so that chances still count."""
MAX_RESERVE_SHARE = 0.2
"""Largest share of the device's blocks that are free or have a copy, so that a step can have them without a
loss."""
MAX_TO_COPY = 32
"""Most blocks without a copy that are looked at for one batch of copies."""


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
        self._pool, self._tier = pool, tier
        self._chunk_tokens, self._costs = chunk_tokens, costs
        self._retain_memory, self._clock = retain_memory, clock
        self.owners = ContentOwners(clock, turn_blocks=self.tenant_blocks(pool.num_blocks, block_bytes))
        step_blocks = max(1, chunk_tokens // pool.block_size_tokens)
        self._reserve = min(step_blocks, int(MAX_RESERVE_SHARE * pool.num_blocks))
        self._on_device: ValueOrder | None = None
        self._in_host: ValueOrder | None = None
        if policy == "value":
            self._on_device = self._value_order(self._value_on_device, self._has_host_copy)
            if tier is not None:
                self._in_host = self._value_order(self._value_in_host, self._has_device_copy, self._reserve)
        on_device = LruOrder() if self._on_device is None else self._on_device
        self.device = self._order(on_device, pool.num_blocks, block_bytes)
        pool.order_by(self.device)
        self.host: RetainingOrder | None = None
        if tier is not None:
            num_slots = tier.slots.num_slots
            in_host = ReuseLruOrder(num_slots, FIRST_USE_SHARE) if self._in_host is None else self._in_host
            self.host = self._order(in_host, num_slots, tier.block_bytes)
            tier.slots.order_by(self.host)
            tier.slots.on_change(self._host_changed)
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

    def to_copy(self) -> list[int] | None:
        """Return the idle blocks that should have a copy in the host tier before others; None: all should.

        While the host tier has free slots, copies displace nothing. Later they are made only of blocks that
        are evicted next, so that the tiers do not hold the same content, and only if they displace what
        returns less likely, or the copy of a block that is in use or retained.
        """
        on_device, in_host = self._on_device, self._in_host
        if on_device is None or in_host is None or self._tier is None or self._tier.slots.has_free:
            return None
        num_lacking = self._reserve - self._pool.counts().free - on_device.num_copied
        displaced = next(iter(in_host.first(1)), None)
        if num_lacking <= 0 or displaced is None:
            return []
        block_id = self._pool.find(self._tier.slots.hash_of(displaced))
        if block_id is None:
            above_rate = in_host.rate_of(displaced) or 0.0
        elif block_id in on_device:
            return []  # a copy instead of another one: the two would displace each other for ever
        else:
            above_rate = -1.0
        return on_device.first_without_copy(min(num_lacking, MAX_TO_COPY), above_rate)

    def _order(self, inner: EvictionOrder, size: int, block_bytes: int) -> RetainingOrder:
        return RetainingOrder(inner, clock=self._clock, size=size, tenant_blocks=self.tenant_blocks(size, block_bytes))

    def _value_order(
        self, value: ContentValue, has_copy: Callable[[int], bool], kept_copies: int | None = None
    ) -> ValueOrder:
        return ValueOrder(
            clock=self._clock,
            return_rate=self.owners.return_rate,
            value=value,
            has_copy=has_copy,
            kept_copies=kept_copies,
        )

    def _value_on_device(self, rate: float, position: int, has_copy: bool, is_running: bool) -> float:
        """Return what a device block is worth: it saves to compute it, or to reload it from the host tier.

        A request that waits for its turn has had its reload, and would compute what it has lost since.
        """
        compute_s = self._compute_s(position)
        return rate * (min(compute_s, self._load_s(compute_s)) if has_copy and not is_running else compute_s)

    def _value_in_host(self, rate: float, position: int, has_copy: bool, is_running: bool) -> float:
        """Return what a slot is worth: it saves to compute its block instead of reloading it.

        Of what the device has, too, that is lowest which the device keeps for longest, but for content that
        is not expected to be used again.
        """
        if has_copy:
            return -rate if rate else -inf
        compute_s = self._compute_s(position)
        return rate * max(compute_s - self._load_s(compute_s), MIN_SAVED_SHARE * compute_s)

    def _load_s(self, compute_s: float) -> float:
        load_s = 0.0 if self._tier is None else self._tier.load_block_s or 0.0
        return max(load_s, MIN_SAVED_SHARE * compute_s)

    def _has_host_copy(self, block_id: int) -> bool:
        return self._tier is not None and self._tier.holds(self._pool.hash_of(block_id))

    def _has_device_copy(self, slot: int) -> bool:
        return self._tier is not None and self._pool.find(self._tier.slots.hash_of(slot)) is not None

    def _host_changed(self, block_hash: BlockHash) -> None:
        block_id = self._pool.find(block_hash)
        if block_id is not None:
            self._pool.copy_changed(block_id)

    def _compute_s(self, position: int) -> float:
        costs = self._costs()
        if costs is None:
            return 1.0
        return block_compute_s(costs, self._pool.block_size_tokens, self._chunk_tokens, num_before=position)
