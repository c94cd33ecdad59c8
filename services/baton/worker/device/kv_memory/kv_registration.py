"""Allocates the KV memory of a worker and registers it with the transfer backend, so that peers can read
it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from baton.core.errors import ConfigError, LayoutMismatch
from baton.core.ids import WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.engine.kv_cache.sizing import free_host_bytes
from baton.runtime.config.byte_sizes import format_size
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.transfer.backend import TransferBackend
from baton.transfer.backends.host_memory import (
    HOST,
    Bytes,
    HostMemory,
    KvRegion,
    anonymous,
)
from baton.transfer.backends.one_sided_backend import probe_blocks
from baton.transfer.backends.staged_backend import StagedBackend
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.device.kv_memory.kv_path import KvPath
from baton.worker.device.kv_memory.open_transfer import (
    allocator_for,
    combined,
    nixl_required,
    nixl_settings,
    open_collective_on_gpu,
    open_host_backend,
)

if TYPE_CHECKING:
    from baton.model.device.kv_tensors import KvCache

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMemory:
    """Host memory for copies of KV, which peers can read, too.

    kv: the slots, [num_slots, block_bytes] uint8
    generations: their generation table
    """

    kv: Bytes
    generations: MemoryGenerationTable


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredMemory:
    """KV memory that peers can read.

    generations: the generation table of its blocks
    backend: the transfer backend that it is registered with
    close: frees the memory, and that of the tier
    tier: memory of the host tier; None without one
    note: text to append to the device summary
    """

    generations: MemoryGenerationTable
    backend: TransferBackend
    close: Callable[[], None]
    tier: TierMemory | None = None
    note: str = ""


def register_host_memory(
    config: WorkerConfig, worker: WorkerRef, layout: KvLayout, num_blocks: int, num_slots: int = 0
) -> tuple[Bytes, RegisteredMemory]:
    """Allocate and register host memory. Returns the blocks [num_blocks, block_bytes] uint8 and their
    registration.

    num_slots: of the host tier; 0 for none.
    Raises ConfigError if the memory cannot be allocated, or the transfer backend cannot be used here.
    """
    memory = _allocate(config, layout, num_blocks, "--kv-memory")
    generations = MemoryGenerationTable(memory.generation_table, worker.worker_epoch)
    slots, tier = _allocate_tier(config, worker, layout, num_slots)
    backend = open_host_backend(config, worker, layout, memory, slots)
    memory.prefault()
    if slots is not None:
        slots.prefault()

    def close() -> None:
        memory.close()
        if slots is not None:
            slots.close()

    return memory.kv, RegisteredMemory(generations=generations, backend=backend, close=close, tier=tier)


def _allocate(config: WorkerConfig, layout: KvLayout, num_blocks: int, option: str) -> HostMemory:
    """Allocate memory that the transfer backend can register. `option`: sets its size."""
    try:
        return allocator_for(config.transfer)(num_blocks, layout.block_bytes)
    except OSError as error:
        size = format_size(num_blocks * layout.block_bytes)
        raise ConfigError(f"cannot allocate {size} for KV ({error.strerror}): set a smaller {option}") from error


def _allocate_tier(
    config: WorkerConfig, worker: WorkerRef, layout: KvLayout, num_slots: int
) -> tuple[HostMemory | None, TierMemory | None]:
    """Allocate the memory of the host tier. Its pages are allocated when they are first written."""
    if not num_slots:
        return None, None
    memory = _allocate(config, layout, num_slots, "--host-kv-memory")
    generations = MemoryGenerationTable(memory.generation_table, worker.worker_epoch)
    return memory, TierMemory(kv=memory.kv, generations=generations)


def register_gpu_memory(
    config: WorkerConfig,
    worker: WorkerRef,
    cache: "KvCache",
    free_bytes: Callable[[], int] = free_host_bytes,
    *,
    path: KvPath = KvPath.DIRECT,
    num_slots: int = 0,
) -> RegisteredMemory:
    """Register the KV cache of a GPU, or stage it in host memory: if `path` says so, or if NIXL cannot
    register GPU memory.

    num_slots: of the host tier; 0 for none.
    Raises ConfigError if there is not enough host memory for staging.
    """
    if config.transfer != "local" and (path is KvPath.DIRECT or not _can_stage(config, cache, free_bytes())):
        try:
            return register_directly(config, worker, cache, num_slots=num_slots)
        except LayoutMismatch:
            raise
        except Exception as error:  # NIXL's exceptions have no common base
            if isinstance(error, ConfigError) and config.transfer != "auto":
                raise
            log.warning(
                "gpu_kv_not_registered",
                error=f"{type(error).__name__}: {error}",
                hint="KV is staged through host memory, which is slower",
            )
    return register_staged(config, worker, cache, free_bytes, num_slots=num_slots)


def _can_stage(config: WorkerConfig, cache: "KvCache", free: int) -> bool:
    """Return False, with a warning, if staging was chosen only for its speed and the host lacks memory."""
    if config.gpu_kv != "auto" or cache.memory.nbytes <= free:
        return True
    needed = f"{format_size(cache.memory.nbytes)}, and {free >> 20} MiB are free"
    hint = "peers read GPU memory directly, which was measured to be slower; a smaller --kv-memory can be staged"
    log.warning("gpu_kv_not_staged", problem=f"the host copy needs {needed}", hint=hint)
    return False


def register_staged(
    config: WorkerConfig,
    worker: WorkerRef,
    cache: "KvCache",
    free_bytes: Callable[[], int] = free_host_bytes,
    *,
    num_slots: int = 0,
) -> RegisteredMemory:
    """Register host memory of the size of a GPU's KV cache, through which its blocks are copied.

    num_slots: of the host tier; 0 for none.
    Raises ConfigError if there is not enough host memory.
    """
    from baton.model.device.host_staging import HostStaging

    layout, num_blocks = cache.layout, cache.num_blocks
    if (needed := num_blocks * layout.block_bytes) > (free := free_bytes()):
        raise ConfigError(
            f"GPU KV is staged through host memory, which needs {format_size(needed)}; only {free >> 20} MiB are free: "
            "set a smaller --kv-memory, or --gpu-kv direct if peers reach GPU memory"
        )
    kv, registered = register_host_memory(config, worker, layout, num_blocks, num_slots)
    backend = StagedBackend(registered.backend, HostStaging(cache, kv))
    return replace(registered, backend=backend, note=", staged through host memory")


def register_directly(
    config: WorkerConfig, worker: WorkerRef, cache: "KvCache", memory_kind: str = "cuda", *, num_slots: int = 0
) -> RegisteredMemory:
    """Register the KV cache of a GPU itself, with NIXL, NCCL or both, by `--transfer`.

    Raises what NIXL raises if it does not support this memory.

    `memory_kind`: `HOST` tries the code without a GPU. `num_slots`: of the host tier; 0 for none.
    """
    import numpy as np

    from baton.model.device.device_info import bind_thread

    scratch = cache.memory.new_zeros(probe_blocks(cache.num_blocks, cache.layout), cache.layout.block_bytes)
    gpu_region = partial(KvRegion, memory_kind=memory_kind, device_id=cache.device.index or 0)
    table = np.frombuffer(anonymous(cache.num_blocks * ENTRY_BYTES), dtype=np.uint8)
    slots, tier = _allocate_tier(config, worker, cache.layout, num_slots)

    def open_nixl() -> TransferBackend:
        with nixl_required():
            from baton.transfer.backends.nixl.nixl_backend import NixlBackend

            return NixlBackend(
                worker=worker,
                layout=cache.layout,
                kv=gpu_region(address=cache.memory.data_ptr(), num_bytes=cache.memory.nbytes),
                generation=KvRegion(address=int(table.ctypes.data), num_bytes=table.nbytes),
                scratch=gpu_region(address=scratch.data_ptr(), num_bytes=scratch.nbytes, owner=scratch),
                tier=slots,
                bind_thread=partial(bind_thread, cache.device) if memory_kind != HOST else lambda: None,
                **nixl_settings(config),
            )

    def open_nccl() -> TransferBackend:
        return open_collective_on_gpu(config, worker, cache, table, slots)

    if config.transfer == "auto":
        nixl = open_nixl()  # without it, KV is staged, so that other backends can move it
        backend = combined([("nixl", lambda: nixl), ("collective", open_nccl)])
    else:
        backend = open_nccl() if config.transfer == "collective" else open_nixl()
    return RegisteredMemory(
        generations=MemoryGenerationTable(table, worker.worker_epoch),
        backend=backend,
        close=lambda: None if slots is None else slots.close(),
        tier=tier,
    )
