"""What one worker computes and moves bytes with: its model, proven; its KV memory, sized and registered;
executor, pool and transport.

The only module of the worker that knows tensors exist, and it imports them when it is called: a worker over
other leaves needs none.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from baton.core.errors import ConfigError, LayoutMismatch
from baton.core.ids import WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.core.step_cost import COSTS_VERSION, StepCostModel
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.sizing import DEVICE_SHARE, HOST_SHARE, free_host_bytes, num_kv_blocks
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.step import Executor
from baton.runtime.config.byte_sizes import format_size
from baton.runtime.config.durations import format_duration
from baton.runtime.config.settings import MIB, WorkerConfig
from baton.runtime.config.step_cost_text import parse_step_costs
from baton.runtime.logging import get_logger
from baton.runtime.process.cores import core_quota, num_usable_cores
from baton.transfer.backend import TransferBackend
from baton.transfer.backends.host_memory import Bytes, KvRegion, allocate_private, allocate_shared, anonymous
from baton.transfer.backends.staged_backend import StagedBackend
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.costs.step_cost_keeper import work_of

if TYPE_CHECKING:
    from baton.model.device.kv_tensors import KvCache

log = get_logger(__name__)

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """`summary`: what it is, for people. `costs`: what its steps cost, where that is known without measuring.
    `costs_key`: all that decides it, under which measured ones are kept; empty: they are neither measured nor
    kept. `aclose` when the worker has ended."""

    executor: Executor
    engine: Engine
    pool: BlockPool
    backend: TransferBackend
    summary: str
    close_memory: Callable[[], None]
    costs: StepCostModel | None = None
    costs_key: str = ""

    async def aclose(self) -> None:
        """Ends the executor's thread after the step that runs, waits a little for reads that run, gives the
        memory back."""
        await self.executor.aclose()
        await self.backend.aclose()
        self.close_memory()


def open_device(config: WorkerConfig, worker: WorkerRef) -> Device:
    """Takes seconds to minutes, which the calling thread waits; touches no event loop. Raises ModelError,
    ConfigError or LayoutMismatch."""
    return _open_emulated(config, worker) if config.device == "emulated" else _open_real(config, worker)


def _open_real(config: WorkerConfig, worker: WorkerRef) -> Device:
    from baton.model.device.compute_thread import compute_thread

    num_threads = config.threads_per_worker or default_threads(config.workers_on_host)
    thread = compute_thread(num_threads)
    try:
        return thread.submit(_open_there, config, worker, thread, num_threads).result()
    except BaseException:
        thread.shutdown(wait=False)
        raise


def _open_there(config: WorkerConfig, worker: WorkerRef, thread: ThreadPoolExecutor, num_threads: int) -> Device:
    """In `thread`, which the executor gets."""
    from baton.model.backends.backend_selection import choose_backend
    from baton.model.device.device_memory import free_bytes
    from baton.model.device.device_name import device_name
    from baton.model.device.kv_tensors import KvCache
    from baton.model.loading.model_loader import load_model
    from baton.model.loading.model_source import resolve_model
    from baton.model.peak_memory import measured_step_bytes
    from baton.model.torch_executor import TorchExecutor

    loaded = load_model(
        resolve_model(config.model), dtype=config.dtype, device=config.device, max_model_len=config.max_model_len
    )
    way = choose_backend(
        loaded, kernels=config.kernels, num_threads=num_threads, block_size_tokens=config.block_size_tokens
    )
    layout = loaded.layout(config.block_size_tokens)
    step_bytes = measured_step_bytes(
        loaded,
        way,
        block_size_tokens=config.block_size_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )
    is_host = loaded.device.type == "cpu"
    free = free_bytes(loaded.device, 1 if is_host else config.workers_on_gpu)
    num_blocks = _num_blocks(config, layout, loaded.max_model_len, free, step_bytes=step_bytes, is_host=is_host)
    log.info("kv_sized", num_blocks=num_blocks, block_bytes=layout.block_bytes, step_bytes=step_bytes)
    if not is_host:
        cache = KvCache.zeros(layout, num_blocks, "cuda")
        memory = _device_memory(config, worker, cache)
    else:
        kv, memory = _host_memory(config, worker, layout, num_blocks)
        cache = KvCache.over(kv.reshape(-1).data, layout)
    pool = BlockPool(num_blocks, config.block_size_tokens, memory.generations)
    dtype = str(loaded.dtype).removeprefix("torch.")
    executor = TorchExecutor(loaded.model, cache, thread=thread, way=way)
    executor.warm(config.max_num_seqs)
    return Device(
        executor=executor,
        engine=_engine(config, pool, loaded.max_model_len, loaded.eos_token_ids),
        pool=pool,
        backend=memory.backend,
        summary=f"{dtype} on {loaded.device}, {num_threads} threads, {_kv_summary(config, layout, num_blocks)}{memory.note}, {way.name}",
        close_memory=memory.close,
        costs_key=costs_key(
            layout.model_fingerprint,
            device_name(loaded.device),
            str(loaded.dtype),
            num_threads,
            way.name,
            config.block_size_tokens,
        ),
    )


def _open_emulated(config: WorkerConfig, worker: WorkerRef) -> Device:
    """No weights, no torch of our own, and nothing to measure: its costs are what it was told. It makes no
    end of text: an answer lasts until its max_tokens or a stop."""
    from baton.engine.executors.emulated import EmulatedExecutor
    from baton.engine.executors.emulated_model import read_emulated_model
    from baton.model.loading.model_source import resolve_model

    costs = parse_step_costs(config.emulated_costs)
    model = read_emulated_model(resolve_model(config.model), dtype=config.dtype, max_model_len=config.max_model_len)
    layout = model.layout(config.block_size_tokens)
    num_blocks = _num_blocks(config, layout, model.max_model_len, free_host_bytes())
    kv, memory = _host_memory(config, worker, layout, num_blocks)
    pool = BlockPool(num_blocks, config.block_size_tokens, memory.generations)
    return Device(
        executor=EmulatedExecutor(
            layout=layout,
            kv=kv,
            vocab_size=model.vocab_size,
            step_seconds=lambda plan: costs.step_seconds(work_of(plan)),
        ),
        engine=_engine(config, pool, model.max_model_len, eos_token_ids=()),
        pool=pool,
        backend=memory.backend,
        summary=f"emulated, {_pace_summary(costs)}, {_kv_summary(config, layout, num_blocks)}",
        close_memory=memory.close,
        costs=costs,
    )


def _engine(config: WorkerConfig, pool: BlockPool, max_model_len: int, eos_token_ids: tuple[int, ...]) -> Engine:
    return Engine(
        EngineConfig(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size_tokens=config.block_size_tokens,
            eos_token_ids=eos_token_ids,
            max_waiting_seqs=config.max_queue,
        ),
        pool,
    )


def _pace_summary(costs: StepCostModel) -> str:
    step, token, seq = map(format_duration, (costs.step_s, costs.prefill_token_s, costs.decode_seq_s))
    return f"{step} a step, {token} a prompt token, {seq} a decoding sequence"


def _kv_summary(config: WorkerConfig, layout: KvLayout, num_blocks: int) -> str:
    size_mib = num_blocks * layout.block_bytes / MIB
    return f"KV {num_blocks} blocks of {layout.block_size_tokens} tokens ({size_mib:.0f} MiB), {config.transfer}"


def costs_key(*decides: str | int) -> str:
    """Of everything that decides what a step costs."""
    return blake2b("\n".join(str(part) for part in (COSTS_VERSION, *decides)).encode(), digest_size=16).hexdigest()


def default_threads(workers_on_host: int) -> int:
    """The cores that this process may use, or where it may use all of them, its share; no more than its share
    of a container's limit."""
    total, mine, quota = os.cpu_count() or 1, num_usable_cores(), core_quota()
    cores = mine if mine < total else max(1, total // workers_on_host)
    return cores if quota is None else max(1, min(cores, int(quota / workers_on_host)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """Registered KV memory: its generation table, and what peers read it through. `note`: to add to what
    people are told of it."""

    generations: MemoryGenerationTable
    backend: TransferBackend
    close: Callable[[], None]
    note: str = ""


def _num_blocks(
    config: WorkerConfig, layout: KvLayout, max_model_len: int, free: int, *, step_bytes: int = 0, is_host: bool = True
) -> int:
    return num_kv_blocks(
        layout,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        free=free,
        step_bytes=step_bytes,
        share=HOST_SHARE if is_host else DEVICE_SHARE,
        num_sharing=config.workers_on_host if is_host else 1,  # `free` of a GPU is this worker's part
        kv_memory=config.kv_memory,
    )


def _host_memory(config: WorkerConfig, worker: WorkerRef, layout: KvLayout, num_blocks: int) -> tuple[Bytes, _Memory]:
    """With the blocks, [num_blocks, block_bytes]."""
    allocate = allocate_shared if config.transfer == "local" else allocate_private
    try:
        memory = allocate(num_blocks, layout.block_bytes)
    except OSError as error:
        size = format_size(num_blocks * layout.block_bytes)
        raise ConfigError(f"no memory for {size} of KV ({error.strerror}): give a smaller --kv-memory") from error
    generations = MemoryGenerationTable(memory.generation_table, worker.worker_epoch)
    backend: TransferBackend
    if config.transfer == "local":
        from baton.transfer.backends.local_backend import LocalBackend

        backend = LocalBackend(worker=worker, layout=layout, memory=memory)
    else:
        from baton.transfer.backends.nixl_backend import NixlBackend

        with _nixl_here():
            backend = NixlBackend.over(memory, worker=worker, layout=layout, **_nixl_settings(config))
    memory.touch()
    return memory.kv, _Memory(generations=generations, backend=backend, close=memory.close)


def _device_memory(config: WorkerConfig, worker: WorkerRef, cache: "KvCache") -> _Memory:
    """Of a GPU: registered as it is, or where that cannot be, with as much host memory beside it."""
    if config.transfer == "nixl":
        try:
            return _registered(config, worker, cache)
        except (ConfigError, LayoutMismatch):
            raise
        except Exception as error:  # NIXL's exceptions have no common base
            log.warning(
                "kv_not_registered", why=f"{type(error).__name__}: {error}", hint="KV goes through host memory, slower"
            )
    return _staged(config, worker, cache)


def _staged(config: WorkerConfig, worker: WorkerRef, cache: "KvCache") -> _Memory:
    from baton.model.device.host_staging import HostStaging

    layout, num_blocks = cache.layout, cache.num_blocks
    if (needed := num_blocks * layout.block_bytes) > (free := free_host_bytes()):
        raise ConfigError(
            f"KV of the GPU goes through host memory here, and its {format_size(needed)} are more than the {free >> 20} MiB that are free: "
            "give a smaller --kv-memory"
        )
    kv, memory = _host_memory(config, worker, layout, num_blocks)
    backend = StagedBackend(memory.backend, HostStaging(cache, kv))
    return replace(memory, backend=backend, note=", staged through host memory")


def _registered(config: WorkerConfig, worker: WorkerRef, cache: "KvCache") -> _Memory:
    import numpy as np

    from baton.transfer.backends.nixl_backend import NixlBackend

    table = np.frombuffer(anonymous(cache.num_blocks * ENTRY_BYTES), dtype=np.uint8)
    with _nixl_here():
        backend = NixlBackend(
            worker=worker,
            layout=cache.layout,
            kv=KvRegion(
                address=cache.blocks.data_ptr(),
                num_bytes=cache.num_blocks * cache.layout.block_bytes,
                memory_kind="cuda",
                device_id=cache.device.index or 0,
            ),
            generation=KvRegion(address=int(table.ctypes.data), num_bytes=table.nbytes),
            **_nixl_settings(config),
        )
    return _Memory(generations=MemoryGenerationTable(table, worker.worker_epoch), backend=backend, close=lambda: None)


@contextmanager
def _nixl_here() -> Iterator[None]:
    """Raises ConfigError where NIXL has no wheel."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"NIXL cannot be used here ({error}); on one machine --transfer local needs none") from error


def _nixl_settings(config: WorkerConfig) -> dict[str, Any]:
    return {"loopback_only": config.host in _LOOPBACK, "port_range": config.kv_port_range}
