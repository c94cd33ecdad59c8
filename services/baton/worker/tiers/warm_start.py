"""Loads content from the disk to the device after a start, so that the first requests find it there."""

import asyncio
from collections.abc import Callable, Sequence

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
PART_BLOCKS, PART_SHARE, PART_BYTES = 64, 1 / 16, 16 * 2**20
"""Largest number of blocks, share of the device, and size of what is loaded at once."""
PART_S = 1.0
"""Longest time for one part. It holds its blocks, which the first request may need."""
MEASURING_PARTS = 2
"""Parts that are loaded even if computing seems as fast: a disk is measured while processes start."""
POLL_S = 0.05
MAX_WAIT_S = 300.0
"""Time that it waits for requests to end, before it leaves the rest on the disk."""


class WarmStart:
    """Loads what the disk would evict last, while no request is in the engine.

    Evicts nothing. With sliding windows the table of a block is not known, and nothing is loaded.
    """

    def __init__(
        self, *, engine: Engine, disk: DiskTier, reloads: Reloads, costs: Callable[[], StepCostModel | None]
    ) -> None:
        self._engine, self._pool = engine, engine.pool
        self._disk, self._reloads, self._costs = disk, reloads, costs
        self._held: list[list[int]] = []
        self._waited_s = 0.0

    async def run(self) -> None:
        """Load until a quarter of the device's blocks is free, or computing would be as fast."""
        pool, block_bytes = self._pool, self._disk.block_bytes
        left_free = int(LEFT_FREE_SHARE * pool.num_blocks)
        blocks = [] if pool.windows.has_windows else self._disk.evicted_last(pool.counts().free - left_free)
        part_blocks = max(1, min(PART_BLOCKS, int(PART_SHARE * pool.num_blocks), PART_BYTES // block_bytes))
        clock = asyncio.get_running_loop().time
        started_s, num_loaded = clock(), 0
        try:
            for first in range(0, len(blocks), part_blocks):
                await self._wait_for_requests()
                part = [each for each in blocks[first : first + part_blocks] if self._is_missing(each)]
                is_too_slow = first >= MEASURING_PARTS * part_blocks and not self._pays(part_blocks)
                if is_too_slow or self._is_needed or pool.counts().free < len(part) + left_free:
                    break
                part_began_s = clock()
                num_loaded += await self._load(part)
                if clock() - part_began_s >= PART_S:
                    break
        finally:
            self._release()
        if blocks:
            took_s = clock() - started_s
            log.info("kv_warm_start", num_blocks=num_loaded, most=len(blocks), took_s=took_s, waited_s=self._waited_s)

    async def _wait_for_requests(self) -> None:
        """Wait until requests have ended, at most `MAX_WAIT_S` in all. They get the blocks that are held."""
        while self._is_needed and self._waited_s < MAX_WAIT_S:
            self._release()
            await asyncio.sleep(POLL_S)
            self._waited_s += POLL_S

    @property
    def _is_needed(self) -> bool:
        """True while requests compute or reload."""
        return not self._engine.is_idle or any(self._reloads.num_loading_blocks.values())

    def _is_missing(self, block: BlockToStore) -> bool:
        return self._pool.find(block.block_hash) is None and self._disk.holds(block.block_hash)

    def _pays(self, num_blocks: int) -> bool:
        """Return True if blocks are loaded faster than they are computed, or if that is not known."""
        costs, compute_s = self._costs(), None
        if costs is not None:
            chunk_tokens = self._engine.config.max_num_batched_tokens
            compute_s = num_blocks * block_compute_s(costs, self._pool.block_size_tokens, chunk_tokens)
        return reload_pays(compute_s=compute_s, reload_s=self._disk.load_s(num_blocks))

    async def _load(self, blocks: Sequence[BlockToStore]) -> int:
        """Load blocks up to the first one that is no longer there or has a defect. Returns how many."""
        pool, receiving = self._pool, self._pool.allocate_receiving(len(blocks))
        if receiving is None:
            return 0
        num_loaded = 0
        try:
            num_loaded = await self._disk.load_unused([each.block_hash for each in blocks], receiving, within_s=PART_S)
            # Content may have been withdrawn since.
            num_loaded = next((i for i in range(num_loaded) if not self._disk.holds(blocks[i].block_hash)), num_loaded)
        finally:
            for block_id, block in zip(receiving[:num_loaded], blocks, strict=False):
                pool.mark_received(block_id, block.block_hash)
                chain = (block.block_hash,)
                pool.announce(chain, 0, 1, is_end=block.is_announced, tenant_root=block.tenant_root)
            pool.drop_receiving(receiving[num_loaded:])
            self._held.append(receiving)
        return num_loaded

    def _release(self) -> None:
        """Make the loaded blocks idle. What was loaded first is evicted last, as on the disk."""
        while self._held:
            self._pool.unref(self._held.pop())
