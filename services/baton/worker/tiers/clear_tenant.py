"""Erases the cached KV of a tenant on all tiers of one worker."""

import asyncio
from collections.abc import Sequence

from baton.core.kv.block_hash import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.tiers.kv_tier import KvTier
from baton.runtime.logging import get_logger

log = get_logger(__name__)

NUM_ATTEMPTS, RETRY_S = 30, 10.0
"""Attempts to erase KV on a disk that fails, and the pause between two."""


async def clear_tenant(pool: BlockPool, tiers: Sequence[KvTier], tenant_root: BlockHash) -> int:
    """Drop all KV of a tenant, and return how many blocks of the device and of the disk had any.

    Requests that use blocks go on, but no other request finds these. KV on a disk is overwritten. If the disk
    does not allow that, it is tried again for five minutes; each failure is logged as an error.
    """
    num_blocks = pool.forget_tenant(tenant_root)
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            for tier in tiers:
                num_blocks += await tier.erase_tenant(tenant_root)
            is_erased = True
        except OSError as error:
            is_erased = False
            is_last = attempt == NUM_ATTEMPTS
            hint = "repair the disk, then clear again, or delete the worker's file" if is_last else "it is tried again"
            log.error("tenant_not_erased", problem=str(error), attempt=attempt, hint=hint)
        num_blocks += pool.forget_tenant(tenant_root)  # a load may have published some meanwhile
        if is_erased:
            log.info("tenant_erased", num_blocks=num_blocks)
            break
        if attempt < NUM_ATTEMPTS:
            await asyncio.sleep(RETRY_S)
    return num_blocks
