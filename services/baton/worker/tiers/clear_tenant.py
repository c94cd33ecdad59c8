"""Erases the cached KV of a tenant on all tiers of one worker."""

from collections.abc import Sequence

from baton.core.kv.block_hash import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.tiers.kv_tier import KvTier
from baton.runtime.logging import get_logger

log = get_logger(__name__)


async def clear_tenant(pool: BlockPool, tiers: Sequence[KvTier], tenant_root: BlockHash) -> int:
    """Drop all KV of a tenant, and return how many blocks of the device and of the disk had any.

    Requests that use blocks go on, but no other request finds these. KV on a disk is overwritten. If the disk
    does not allow that, an error is logged.
    """
    num_blocks = pool.forget_tenant(tenant_root)
    try:
        for tier in tiers:
            num_blocks += await tier.erase_tenant(tenant_root)
    except OSError as error:
        log.error("tenant_not_erased", problem=str(error), hint="KV of the tenant may be left on the disk")
    num_blocks += pool.forget_tenant(tenant_root)  # a load may have published some meanwhile
    log.info("tenant_forgotten", num_blocks=num_blocks)
    return num_blocks
