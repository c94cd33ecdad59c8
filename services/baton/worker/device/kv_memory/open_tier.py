"""Opens the host tier of a worker's KV over memory that was registered with its device."""

from baton.core.ids import WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.engine.kv_cache.sizing import num_tier_slots
from baton.runtime.config.settings import WorkerConfig
from baton.transfer.backends.host_memory import Bytes
from baton.worker.device.kv_memory.kv_registration import RegisteredMemory
from baton.worker.tiers.host_tier import HostTier
from baton.worker.tiers.tier_copies import CopyThread, HostCopies, TierCopies

MAX_PINNED_TIER_BYTES = 32 << 30
"""Largest host tier that is pinned for faster copies. A larger one would delay the start of a worker."""


def num_slots_for_worker(
    config: WorkerConfig,
    layout: KvLayout,
    num_blocks: int,
    free_bytes: int,
    *,
    is_host: bool = True,
    is_staged: bool = False,
) -> int:
    """Return the slots of this worker's host tier; 0 for none.

    free_bytes: free host memory, before the KV cache is allocated. is_host: the KV cache is in host memory.
    is_staged: a copy of it is.
    """
    return num_tier_slots(
        layout,
        num_blocks,
        free=free_bytes - (num_blocks * layout.block_bytes if is_host or is_staged else 0),
        host_kv_memory=config.host_kv_memory,
        is_host=is_host,
        num_sharing=config.workers_on_host,
    )


def open_host_tier(
    worker: WorkerRef,
    registered: RegisteredMemory,
    *,
    kv: Bytes | None = None,
    copies: TierCopies | None = None,
    shares_cores: bool = True,
) -> HostTier | None:
    """Open the host tier; None if no memory was registered for it.

    kv: the device's blocks, if they are in host memory. copies: how to copy them otherwise.
    shares_cores: see `HostTier`
    """
    tier = registered.tier
    if tier is None:
        return None
    if copies is None:
        if kv is None:
            raise ValueError("neither the device's blocks nor copies of them are given")
        copies = HostCopies(kv, tier.kv)
    return HostTier(
        worker=worker,
        shares_cores=shares_cores,
        num_slots=tier.kv.shape[0],
        block_bytes=tier.kv.shape[1],
        generations=tier.generations,
        copies=copies,
        runner=CopyThread(),
    )
