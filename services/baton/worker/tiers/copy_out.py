"""Copies idle blocks of the device to a slower tier, in the background.

Blocks of preempted sequences come first, then those of a session whose client has announced its next turn,
then those at their second use, then those that are slow to compute again. Within each group the block that
became idle first comes first. A tier that should not hold what the device holds gets the last two groups only
shortly before the device evicts them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress

from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_events import Tier
from baton.core.step_cost import StepCostModel
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.tiers.copy_policy import block_compute_s, is_worth_copying, max_copied_blocks
from baton.engine.tiers.kv_tier import BlockToStore, KvTier
from baton.worker.tiers.copy_pacing import CopyPacing

POLL_S = 0.1
"""Time after which a pause looks again whether steps still run."""


class CopyOut:
    """Chooses blocks of one pool and stores them in one tier. Implements `PoolListener`.

    A block that is being copied is not reallocated until the copy has ended. Each tier has its own.
    """

    def __init__(
        self,
        pool: BlockPool,
        tier: KvTier,
        *,
        block_bytes: int,
        chunk_tokens: int,
        costs: Callable[[], StepCostModel | None],
        pacing: CopyPacing,
        on_stored: Callable[[], None] = lambda: None,
        to_copy: Callable[[], list[int] | None] = lambda: None,
    ) -> None:
        """Follow `pool`. `run` copies.

        chunk_tokens: most tokens of a step
        pacing: the pauses between copies, which all tiers of a worker share
        on_stored: called when the content of the tier has changed
        to_copy: returns the idle blocks to copy if they are worth it, besides preempted and announced ones;
            None: all
        """
        self._pool, self._tier = pool, tier
        self._block_bytes, self._chunk_tokens = block_bytes, chunk_tokens
        self._costs, self._pacing, self._on_stored = costs, pacing, on_stored
        self._to_copy = to_copy
        self._demoted: OrderedDict[int, None] = OrderedDict()
        self._announced: OrderedDict[int, None] = OrderedDict()
        self._reused: OrderedDict[int, None] = OrderedDict()
        self._others: OrderedDict[int, None] = OrderedDict()
        self._queues = (self._demoted, self._announced, self._reused, self._others)
        self._woken, self._demotion = asyncio.Event(), asyncio.Event()
        self._num_copied_before = 0
        pool.add_listener(self)
        pool.on_freed(self._wake)
        pool.on_forgotten(lambda _: self._wake())

    def became_idle(self, block_id: int) -> None:
        """Consider a block. A replica is left to the worker that it was pulled from."""
        self._forget(block_id)
        owner, _, is_reused = self._pool.use_of(block_id)
        if self._pool.is_replica(block_id):
            return
        if owner is not None and owner.has_announced_turn:
            self._announced[block_id] = None
        else:
            (self._reused if is_reused else self._others)[block_id] = None

    def demote(self, block_ids: Iterable[int]) -> None:
        """Copy idle blocks first, in this order, because they will certainly be used again."""
        for block_id in block_ids:
            self._forget(block_id)
            self._demoted[block_id] = None
        self._demotion.set()
        self._wake()

    def withdrawn(self, block_hash: BlockHash) -> None:
        self._tier.discard(block_hash)
        self._on_stored()

    async def run(self) -> None:
        """Copy until cancelled. A running copy ends before this does."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            await self._pause()
            while batch := self.next_batch():
                before_s = self._tier.stores_busy_s
                try:
                    num_stored = await self._tier.store(batch)
                finally:
                    self._pool.end_copy([block.block_id for block in batch])
                self._pacing.charge(self._tier.stores_busy_s - before_s)
                if not num_stored:  # no slot is idle, or copies fail: wait until more blocks become idle
                    self._woken.clear()  # the end of this copy has set it
                    break
                self._on_stored()
                await self._pause()

    async def _pause(self) -> None:
        """Wait until the next copy may begin. Blocks of a preempted sequence wait less: they may be lost."""
        while (wait_s := self._pacing.wait_s(is_urgent=bool(self._demoted))) > 0:
            self._demotion.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, POLL_S)):
                    await self._demotion.wait()

    def next_batch(self) -> list[BlockToStore]:
        """Take the blocks that are copied next, and keep them from being reallocated."""
        batch: list[BlockToStore] = []
        block_s = self._tier.store_s(1) if self._tier.tier is Tier.HOST else None
        most = max_copied_blocks(
            self._pool.num_allocatable, self._block_bytes, block_s, num_before=self._num_copied_before
        )
        only = self._to_copy()
        waiting = (self._reused, self._others) if only is None else ()
        for queue in (self._demoted, self._announced, *waiting):
            while queue and len(batch) < most:
                block_id, _ = queue.popitem(last=False)
                self._take(block_id, batch, is_demoted=queue is self._demoted)
        for block_id in only or ():
            if len(batch) < most:
                self._take(block_id, batch, is_demoted=False)
        self._num_copied_before = len(batch)
        return batch

    def _take(self, block_id: int, batch: list[BlockToStore], *, is_demoted: bool) -> None:
        block = self._to_store(block_id, is_demoted=is_demoted)
        if block is not None:
            batch.append(block)

    def _to_store(self, block_id: int, *, is_demoted: bool) -> BlockToStore | None:
        """Return the block if it is still idle and worth it. One that is in use will become idle again."""
        pool = self._pool
        returns, is_reused = self._returns(block_id), pool.is_reused(block_id)
        if self._tier.holds(pool.hash_of(block_id)):
            if is_reused:  # it was copied after its first use
                self._tier.count_use(pool.hash_of(block_id))
            return None
        if not (is_demoted or self._is_worth_copying(returns=returns)):
            return None
        block_hash = pool.begin_copy(block_id)
        if block_hash == NO_HASH:
            return None
        return BlockToStore(
            block_id=block_id,
            block_hash=block_hash,
            is_announced=pool.is_announced(block_hash),
            is_reused=is_reused,
            tenant_root=pool.tenant_of(block_hash),
            use=pool.use_of(block_id),
        )

    def _returns(self, block_id: int) -> bool:
        """Return True if the block was used again, or its client has announced that it will be."""
        owner, _, is_reused = self._pool.use_of(block_id)
        return is_reused or (owner is not None and owner.has_announced_turn)

    def _is_worth_copying(self, *, returns: bool) -> bool:
        costs = self._costs()
        compute_s = None
        if costs is not None:
            compute_s = block_compute_s(costs, self._pool.block_size_tokens, self._chunk_tokens)
        return is_worth_copying(is_reused=returns, compute_s=compute_s, reload_s=self._tier.load_block_s)

    def _forget(self, block_id: int) -> None:
        for queue in self._queues:
            queue.pop(block_id, None)

    def _wake(self) -> None:
        if any(self._queues):
            self._woken.set()
