"""Opens the disk tier of a worker's KV over a file of its own in the configured directory."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from baton.core.errors import ConfigError
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_layout import KvLayout
from baton.engine.kv_cache.sizing import free_host_bytes
from baton.engine.tiers.kv_tier import BlockToStore
from baton.runtime.config.byte_sizes import format_size
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.transfer.backends.host_memory import Bytes, anonymous
from baton.worker.disk.block_file import BlockFile, defect_of_write
from baton.worker.disk.disk_format import DiskDefect, FileShape, SlotHeader, file_shape
from baton.worker.disk.disk_runner import DiskThreads
from baton.worker.disk.open_block_file import lock_block_file
from baton.worker.disk.os_file import OsFile, RawFile
from baton.worker.disk.payload_io import PayloadIo, PlainPayloads
from baton.worker.tiers.disk_tier import BlockStore, DiskTier
from baton.worker.tiers.tier_copies import CopyThread, HostCopies, TierCopies

log = get_logger(__name__)

STAGING_BYTES = 16 << 20
"""Host memory through which blocks are copied to and from the disk. It holds at least `MIN_STAGING_ROWS`."""
MIN_STAGING_ROWS, MAX_STAGING_ROWS = 4, 512
INDEX_BYTES = 360
"""Host memory for what is known of one slot: 190 MB for 524,288 slots (2026-11-28)."""
MAX_INDEX_SHARE = 0.5
"""Largest share of the free memory that all slots may take."""


def open_disk_tier(
    config: WorkerConfig,
    worker: WorkerRef,
    layout: KvLayout,
    copies_to: Callable[[Bytes], TierCopies],
    *,
    shares_cores: bool = True,
) -> DiskTier | None:
    """Open the disk tier; None if none is configured.

    copies_to: returns copies between the device and a staging buffer. shares_cores: see `DiskTier`.
    A disk that is full or fails gives a tier without slots, because the worker can serve without it. Raises
    ConfigError if the directory, the size or `--disk-kv-io` cannot be used.
    """
    if config.disk_kv is None or config.disk_kv_size is None:
        return None
    shape = file_shape(layout, config.disk_kv_size)
    if not shape.num_slots:
        raise ConfigError(
            f"--disk-kv-size is {format_size(config.disk_kv_size)}; must hold at least one block of "
            f"{format_size(layout.block_bytes)}, and its header"
        )
    _check_index(shape, layout, config.disk_kv_size)
    num_rows = max(MIN_STAGING_ROWS, min(MAX_STAGING_ROWS, STAGING_BYTES // layout.block_bytes))
    staging = np.frombuffer(anonymous(num_rows * layout.block_bytes), dtype=np.uint8).reshape(num_rows, -1)
    return DiskTier(
        worker=worker,
        store=_open_store(config, shape, staging),
        block_bytes=layout.block_bytes,
        num_rows=num_rows,
        copies=copies_to(staging),
        copy_runner=CopyThread(),
        disk_runner=DiskThreads(),
        shares_cores=shares_cores,
    )


def host_copies(kv: Bytes) -> Callable[[Bytes], TierCopies]:
    """Return how to copy blocks that are in host memory."""
    return partial(HostCopies, kv)


def _check_index(shape: FileShape, layout: KvLayout, size: int) -> None:
    """Raise ConfigError if the memory for all slots of a file is too large for this machine."""
    needed, free = shape.num_slots * INDEX_BYTES, free_host_bytes()
    if needed > MAX_INDEX_SHARE * free:
        raise ConfigError(
            f"--disk-kv-size {format_size(size)} has {shape.num_slots} blocks of {format_size(layout.block_bytes)}; "
            f"their index takes {needed / 1e9:.2f} GB of {free / 1e9:.2f} GB free memory. Choose a smaller size, or "
            "larger blocks with --block-size-tokens"
        )


def _open_store(config: WorkerConfig, shape: FileShape, staging: Bytes) -> BlockStore:
    assert config.disk_kv is not None
    directory = config.disk_kv.expanduser()
    file: OsFile | None = None
    try:
        locked = lock_block_file(directory, shape)
        file = OsFile(locked.fd)
        store = BlockFile(file, shape, locked.file_id, staging, _payloads(config))
    except ConfigError:
        if file is not None:
            file.close()
        raise
    except OSError as error:
        if file is not None:
            file.close()
        log.error("disk_kv_not_opened", directory=str(directory), problem=str(error), hint="the worker runs without it")
        return NoBlocks(Counter({defect_of_write(error): 1}))
    store.defects += locked.defects
    log.info("disk_kv_opened", path=str(locked.path), num_slots=shape.num_slots, num_blocks=len(store.held))
    return store


def _payloads(config: WorkerConfig) -> Callable[[RawFile, Bytes], PayloadIo]:
    if config.disk_kv_io == "threads":
        return PlainPayloads
    from baton.worker.disk.nixl_payloads import NixlPayloads

    backend = {"nixl": "POSIX", "gds": "GDS"}[config.disk_kv_io]

    def nixl(file: RawFile, staging: Bytes) -> PayloadIo:
        try:
            return NixlPayloads(file, staging, backend)
        except (ImportError, OSError) as error:
            message = f"--disk-kv-io {config.disk_kv_io} cannot be used here ({error}); use --disk-kv-io threads"
            raise ConfigError(message) from error

    return nixl


class NoBlocks:
    """Implements `BlockStore` without a file, for a disk that could not be used."""

    num_slots = 0

    def __init__(self, defects: "Counter[DiskDefect]") -> None:
        self.defects = defects
        self.held: list[SlotHeader] = []

    def sequence(self, slot: int) -> int:
        return 0

    def probe(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Do nothing: there are no slots."""

    def write(self, blocks: Mapping[int, BlockToStore], rows: Sequence[int]) -> None:
        """Do nothing: there are no slots."""

    def read(self, hashes: Mapping[int, BlockHash], rows: Sequence[int]) -> list[DiskDefect | None]:
        return []

    def drop(self, sequences: Mapping[int, int]) -> None:
        """Do nothing: there are no slots."""

    def announce(self, sequences: Mapping[int, int]) -> None:
        """Do nothing: there are no slots."""

    def erase(self, tenant_root: BlockHash) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: there is no file."""
