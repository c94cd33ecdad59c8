"""Copies idle blocks of the device to a slower tier, in the background.

Blocks of preempted sequences come first, then those of a session whose client has announced its next turn,
then those at their second use, then those that are slow to compute again. Within each group the block that
became idle first comes first. A tier that should not hold what the device holds gets the last two groups only
shortly before the device evicts them. Blocks that a tier has not stored keep their places.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf

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
        self._taken: dict[int, OrderedDict[int, None]] = {}  # blocks in a copy, and their queues
        self._awaits_more = False  # the tier stored nothing, and no other block has become idle since
        self._woken, self._demotion = asyncio.Event(), asyncio.Event()
        self._num_copied_before = 0
        pool.add_listener(self)
        pool.on_freed(self._wake)
        pool.on_announced(tier.announce)
        pool.on_forgotten(lambda _: self._wake_for_more())

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
        self._awaits_more = False  # the pool wakes

    def demote(self, block_ids: Iterable[int]) -> None:
        """Copy idle blocks first, in this order, because they will certainly be used again."""
        for block_id in block_ids:
            self._forget(block_id)
            self._demoted[block_id] = None
        self._demotion.set()
        self._wake_for_more()

    def withdrawn(self, block_hash: BlockHash) -> None:
        self._tier.discard(block_hash)
        self._on_stored()

    async def run(self) -> None:
        """Copy until cancelled, or until the tier stores nothing any more.

        A running copy ends before this does.
        """
        while self._tier.store_pause_s < inf:
            await self._woken.wait()
            self._woken.clear()
            await self._pause()
            while batch := self.next_batch():
                if await self._store(batch):
                    self._on_stored()
                elif not 0 < self._tier.store_pause_s < inf:
                    break  # no slot is idle, or copies fail: wait until more blocks become idle
                await self._pause()

    async def _store(self, batch: Sequence[BlockToStore]) -> int:
        """Store a batch and return how many of its blocks were stored.

        If none was, the ends of copies do not wake until another block has become idle: the copies to two
        full tiers would wake each other for ever.
        """
        before_s, num_stored = self._tier.stores_busy_s, 0
        self._awaits_more = True
        try:
            num_stored = await self._tier.store(batch)
        finally:
            self.end_batch(batch)
        self._awaits_more = self._awaits_more and not num_stored
        self._pacing.charge(self._tier.stores_busy_s - before_s)
        return num_stored

    async def _pause(self) -> None:
        """Wait until the next copy may begin. Blocks of a preempted sequence wait less: they may be lost."""
        if 0 < (pause_s := self._tier.store_pause_s) < inf:
            await asyncio.sleep(pause_s)
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
                if (block := self._to_store(block_id, is_demoted=queue is self._demoted)) is not None:
                    batch.append(block)
                    self._taken[block_id] = queue
        for block_id in only or ():
            if len(batch) < most and (block := self._to_store(block_id, is_demoted=False)) is not None:
                batch.append(block)
        self._num_copied_before = len(batch)
        return batch

    def end_batch(self, batch: Sequence[BlockToStore]) -> None:
        """Release the blocks of a batch. Those that the tier has not stored come first the next time.

        One that has become idle again meanwhile has its place already.
        """
        for block in reversed(batch):
            block_id, queue = block.block_id, self._taken.pop(block.block_id, None)
            is_settled = self._tier.holds(block.block_hash) or self._pool.hash_of(block_id) != block.block_hash
            if queue is not None and not is_settled and not any(block_id in each for each in self._queues):
                queue[block_id] = None
                queue.move_to_end(block_id, last=False)
        self._pool.end_copy([block.block_id for block in batch])

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
        if any(self._queues) and not self._awaits_more:
            self._woken.set()

    def _wake_for_more(self) -> None:
        self._awaits_more = False
        self._wake()
