"""Loads content from the disk to the device after a start, so that the first requests find it there."""

import asyncio
from collections.abc import Callable

from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.engine.tiers.copy_policy import block_compute_s, reload_pays
from baton.engine.tiers.kv_tier import BlockToStore
from baton.runtime.logging import get_logger
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.reloads import Reloads

log = get_logger(__name__)

LEFT_FREE_SHARE = 0.25
"""Share of the device's blocks that stay free for requests."""
PART_BLOCKS, PART_SHARE = 64, 1 / 16
"""Largest number and share of the device's blocks that are loaded at once. Requests may wait for them."""
MEASURING_PARTS = 2
"""Parts that are loaded even if computing seems as fast: a disk is measured while processes start."""
POLL_S = 0.05
MAX_WAIT_S = 300.0
"""Time that it waits for requests to end, before it leaves the rest on the disk."""


class WarmStart:
    """Loads what an earlier process has written last, while no request is in the engine.

    Evicts nothing. With sliding windows the table of a block is not known, and nothing is loaded.
    """

    def __init__(
        self, *, engine: Engine, disk: DiskTier, reloads: Reloads, costs: Callable[[], StepCostModel | None]
    ) -> None:
        self._engine, self._pool = engine, engine.pool
        self._disk, self._reloads, self._costs = disk, reloads, costs
        self.num_loaded = 0

    async def run(self) -> None:
        """Load until a quarter of the device's blocks is free, or computing would be as fast."""
        pool, left_free = self._pool, int(LEFT_FREE_SHARE * self._pool.num_blocks)
        blocks = self._disk.written_last(pool.counts().free - left_free)
        if pool.windows.has_windows or not blocks:
            return
        clock, part_blocks = (
            asyncio.get_running_loop().time,
            max(1, min(PART_BLOCKS, int(PART_SHARE * pool.num_blocks))),
        )
        started_s, waited_s = clock(), 0.0
        for first in range(0, len(blocks), part_blocks):
            while self._is_needed and waited_s < MAX_WAIT_S:
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S
            part = [
                each
                for each in blocks[first : first + part_blocks]
                if pool.find(each.block_hash) is None and self._disk.holds(each.block_hash)
            ]
            is_too_slow = first >= MEASURING_PARTS * part_blocks and not self._pays(part_blocks)
            if self._is_needed or is_too_slow or pool.counts().free < len(part) + left_free:
                break
            self.num_loaded += await self._load(part)
        log.info("kv_warm_start", num_blocks=self.num_loaded, took_s=clock() - started_s, waited_s=waited_s)

    @property
    def _is_needed(self) -> bool:
        """True while requests compute or reload."""
        return not self._engine.is_idle or any(self._reloads.num_loading_blocks.values())

    def _pays(self, num_blocks: int) -> bool:
        """Return True if blocks are loaded faster than they are computed, or if that is not known."""
        costs, compute_s = self._costs(), None
        if costs is not None:
            chunk_tokens = self._engine.config.max_num_batched_tokens
            compute_s = num_blocks * block_compute_s(costs, self._pool.block_size_tokens, chunk_tokens)
        return reload_pays(compute_s=compute_s, reload_s=self._disk.load_s(num_blocks))

    async def _load(self, blocks: list[BlockToStore]) -> int:
        """Load blocks up to the first one that is no longer there or has a defect. Returns how many."""
        pool, receiving = self._pool, self._pool.allocate_receiving(len(blocks))
        if receiving is None:
            return 0
        num_loaded = 0
        try:
            num_loaded = await self._disk.load_unused([each.block_hash for each in blocks], receiving)
            # Content may have been withdrawn since.
            num_loaded = next((i for i in range(num_loaded) if not self._disk.holds(blocks[i].block_hash)), num_loaded)
        finally:
            for block_id, block in zip(receiving[:num_loaded], blocks, strict=False):
                pool.mark_received(block_id, block.block_hash)
                chain = (block.block_hash,)
                pool.announce(chain, 0, 1, is_end=block.is_announced, tenant_root=block.tenant_root)
            pool.drop_receiving(receiving[num_loaded:])
            pool.unref(receiving)
        return num_loaded
