"""Opens a real device: loads the model, chooses a backend, sizes KV memory and starts the executor.

torch and the model packages are imported inside the functions, because a worker on an emulated device does
not need them.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from baton.core.ids import WorkerRef
from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import windows_text
from baton.engine.constraints.grammar_tokenizer import read_grammar_tokenizer
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.sizing import free_host_bytes
from baton.engine.speculation.modes import finds_forced_tokens
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.runtime.memory.garbage_collection import uncollected_imports
from baton.runtime.process.cores import core_quota, num_usable_cores
from baton.transfer.backends.host_memory import Bytes
from baton.worker.costs.step_cost_keeper import step_costs_key
from baton.worker.device.draft_device import LoadedDraft, draft_config, load_draft
from baton.worker.device.gpu_allocator import require_plain_memory
from baton.worker.device.gpu_start import Say, find_out_about_gpu, logged
from baton.worker.device.gpu_use import step_tokens_of
from baton.worker.device.kv_memory.kv_path import KvPath
from baton.worker.device.kv_memory.kv_registration import RegisteredMemory, register_gpu_memory, register_host_memory
from baton.worker.device.kv_memory.open_disk import host_copies, open_disk_tier
from baton.worker.device.kv_memory.open_tier import MAX_PINNED_TIER_BYTES, num_slots_for_worker, open_host_tier
from baton.worker.device.packing_settings import packing
from baton.worker.device.worker_device import Device, engine_config_of, kv_summary, num_blocks_for_worker
from baton.worker.prefix_files.staged_blocks import StagedBlocks
from baton.worker.tiers.disk_tier import DiskTier
from baton.worker.tiers.host_tier import HostTier
from baton.worker.tiers.tier_copies import CopyThread, TierCopies

if TYPE_CHECKING:
    from baton.model.backends.backend_selection import Backend
    from baton.model.device.kv_tensors import KvCache
    from baton.model.loading.model_loader import LoadedModel

log = get_logger(__name__)

MIN_MASK_THREADS, MAX_MASK_THREADS = 2, 8
"""Threads that compute the masks of one step."""


def open_real_device(config: WorkerConfig, worker: WorkerRef, say: Say) -> Device:
    """Open the CPU or GPU. See `open_device` for the errors."""
    with uncollected_imports():
        from baton.model.device.compute_thread import compute_thread

    num_threads = config.threads_per_worker or default_threads(
        config.workers_on_host,
        num_cores=os.cpu_count() or 1,
        num_usable_cores=num_usable_cores(),
        quota=core_quota(),
    )
    thread = compute_thread(num_threads)
    try:
        return thread.submit(_open_in_compute_thread, config, worker, thread, num_threads, say).result()
    except BaseException:
        thread.shutdown(wait=False)
        raise


def _open_in_compute_thread(
    config: WorkerConfig, worker: WorkerRef, thread: ThreadPoolExecutor, num_threads: int, say: Say
) -> Device:
    """Build the device. Runs in `thread`, which the executor then owns."""
    with uncollected_imports():
        from baton.model.backends.backend_selection import choose_backend
        from baton.model.torch_executor import TorchExecutor

    of_draft = draft_config(config)
    gpu = find_out_about_gpu(config, of_draft, say)  # first, because other processes need memory on the GPU
    loaded = _load(config, num_threads, logged(say))
    backend = choose_backend(
        loaded,
        kernels=config.kernels,
        num_threads=num_threads,
        block_size_tokens=config.block_size_tokens,
        gpu_refused=gpu.refused,
    )
    windows = tuple(params.window for params in backend.attention_params)
    layout = loaded.layout(config.block_size_tokens, windows)
    constraints = _open_constraints(loaded, num_threads, finds_forced=finds_forced_tokens(config.speculate))
    draft = None
    if of_draft is not None:
        draft = load_draft(of_draft, loaded, num_threads, gpu.draft_refused, logged(say))
    num_blocks = _num_blocks(config, loaded, backend, layout, draft, num_threads)
    cache, registered, tier, disk, copies_to = _open_kv(config, worker, loaded, layout, num_blocks, gpu.path.path)
    pool = BlockPool(
        num_blocks,
        config.block_size_tokens,
        registered.generations,
        layout.windows,
        announce_every=config.kv_announce_every,
    )
    executor = TorchExecutor(loaded.model, cache, thread=thread, backend=backend, constraints=constraints)
    draft_device = None if draft is None else draft.open(thread, layout, num_blocks)  # may compile, too
    executor.warm(config.max_num_seqs)
    if draft is not None:
        draft.backend.after_warmup()
    reason = f" ({gpu.path.reason})" if gpu.path.reason else ""
    kv_text = f"{kv_summary(config, layout, num_blocks, tier, disk)}{registered.note}{reason}"
    draft_text = "" if draft_device is None else f", {draft_device.summary}"
    return Device(
        executor=executor,
        engine_config=engine_config_of(config, loaded.max_model_len, loaded.eos_token_ids),
        pool=pool,
        backend=registered.backend,
        constraints=constraints,
        summary=f"{_device_text(loaded)}, {num_threads} threads, {kv_text}, {backend.name}{draft_text}",
        close_memory=registered.close,
        draft=draft_device,
        host_tier=tier,
        disk=disk,
        blocks=StagedBlocks(layout.block_bytes, copies_to, CopyThread()),
        costs_key=_costs_key(loaded, layout, num_threads, backend),
    )


def _costs_key(loaded: "LoadedModel", layout: KvLayout, num_threads: int, backend: "Backend") -> str:
    """Return the key under which measured step costs are kept."""
    from baton.model.device.device_info import device_name

    return step_costs_key(
        layout.model_fingerprint,
        device_name(loaded.device),
        str(loaded.dtype),
        num_threads,
        backend.name,
        layout.block_size_tokens,
    )


def _num_blocks(
    config: WorkerConfig,
    loaded: "LoadedModel",
    backend: "Backend",
    layout: KvLayout,
    draft: LoadedDraft | None,
    num_threads: int,
) -> int:
    """Return how many KV blocks fit beside the weights and the largest step. May run that step."""
    from baton.model.device.device_info import free_bytes
    from baton.model.peak_memory import known_step_bytes

    step_bytes = known_step_bytes(
        loaded,
        backend,
        block_size_tokens=config.block_size_tokens,
        max_num_batched_tokens=step_tokens_of(config),
        max_num_seqs=config.max_num_seqs,
        num_threads=num_threads,
    )
    is_host = loaded.device.type == "cpu"
    mapped_bytes = loaded.mapped_bytes + (0 if draft is None else draft.loaded.mapped_bytes)
    free = max(0, free_bytes(loaded.device, 1 if is_host else config.workers_on_gpu) - mapped_bytes)
    num_blocks = num_blocks_for_worker(
        config, layout, loaded.max_model_len, free, step_bytes=step_bytes, is_host=is_host, draft=draft
    )
    log.info(
        "kv_memory_sized",
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        step_bytes=step_bytes,
        tables=windows_text(layout.tables),
        longest_sequence_blocks=layout.windows.num_blocks_at_once(loaded.max_model_len, step_tokens_of(config)),
    )
    return num_blocks


def _load(config: WorkerConfig, num_threads: int, say: Say) -> "LoadedModel":
    from baton.model.loading.model_loader import load_model
    from baton.model.loading.model_source import resolve_model

    return load_model(
        resolve_model(config.model),
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=config.device,
        weights=config.weights,
        max_model_len=config.max_model_len,
        say=say,
        **packing(config, num_threads),
    )


def _open_kv(
    config: WorkerConfig,
    worker: WorkerRef,
    loaded: "LoadedModel",
    layout: KvLayout,
    num_blocks: int,
    path: KvPath,
) -> tuple["KvCache", RegisteredMemory, HostTier | None, DiskTier | None, Callable[[Bytes], TierCopies]]:
    """Allocate KV memory where the model is, and that of the host tier, register both, and open the file of
    the disk tier. Returns, too, how to copy blocks to and from a staging buffer."""
    from baton.model.device.device_info import gpu_segments
    from baton.model.device.host_staging import DeviceCopies
    from baton.model.device.kv_tensors import KvCache

    is_host, is_staged = loaded.device.type == "cpu", path is KvPath.STAGED
    num_slots = num_slots_for_worker(
        config, layout, num_blocks, free_host_bytes(), is_host=is_host, is_staged=is_staged
    )
    if is_host:
        kv, registered = register_host_memory(config, worker, layout, num_blocks, num_slots)
        cache = KvCache.over(kv.reshape(-1).data, layout, loaded.dtype)
        disk = open_disk_tier(config, worker, layout, host_copies(kv))
        return cache, registered, open_host_tier(worker, registered, kv=kv), disk, host_copies(kv)
    cache = KvCache.zeros(layout, num_blocks, "cuda", loaded.dtype)
    if config.transfer in ("nixl", "auto"):
        require_plain_memory(gpu_segments(), cache.memory.data_ptr())
    registered = register_gpu_memory(config, worker, cache, path=path, num_slots=num_slots)
    copies_to = partial(DeviceCopies, cache)
    disk = open_disk_tier(config, worker, layout, copies_to, shares_cores=False)
    if registered.tier is None:
        return cache, registered, None, disk, copies_to
    copies = DeviceCopies(cache, registered.tier.kv, max_pinned_bytes=MAX_PINNED_TIER_BYTES)
    return cache, registered, open_host_tier(worker, registered, copies=copies, shares_cores=False), disk, copies_to


def _device_text(loaded: "LoadedModel") -> str:
    form = "" if loaded.weight_format == "plain" else f", weights {loaded.weight_format}"
    return f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device}{form}"


def _open_constraints(loaded: "LoadedModel", num_threads: int, *, finds_forced: bool) -> TokenConstraints:
    """Build the tokenizer table for grammars now, because building it blocks the whole process."""
    from baton.model.step.step_launch import MASK_CLOCKS

    constraints = TokenConstraints(
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=read_grammar_tokenizer(loaded.path, vocab_size=loaded.vocab_size, eos_token_ids=loaded.eos_token_ids),
        num_threads=max(MIN_MASK_THREADS, min(num_threads, MAX_MASK_THREADS)),
        clocks=MASK_CLOCKS,
        finds_forced=finds_forced,
    )
    if problem := constraints.load():
        log.warning("grammars_not_supported", problem=problem)
    return constraints


def default_threads(workers_on_host: int, *, num_cores: int, num_usable_cores: int, quota: float | None) -> int:
    """Return the number of compute threads of one worker.

    A process that is restricted to some cores uses all of those. Otherwise the cores are shared evenly by the
    workers of the host. A container quota (`quota`, in cores, None if unlimited) is shared evenly, too, and
    caps the result.
    """
    cores = num_usable_cores if num_usable_cores < num_cores else max(1, num_cores // workers_on_host)
    return cores if quota is None else max(1, min(cores, int(quota / workers_on_host)))
