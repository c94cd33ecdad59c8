"""Finds out about a GPU before a model is loaded, with child processes that need its memory."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.runtime.config.settings import WorkerConfig
from baton.runtime.logging import get_logger
from baton.worker.device.compile_caches import share_compile_caches
from baton.worker.device.gpu_allocator import require_plain_segments
from baton.worker.device.gpu_use import step_tokens_of, uses_gpu
from baton.worker.device.kv_memory.kv_path import KvPath, KvPathChoice, kv_path_for, path_facts

if TYPE_CHECKING:
    from baton.model.gpu_check.check_backends import CheckedModel

log = get_logger(__name__)

LOADING = "loads the model and verifies its kernels, which a first start compiles"
Say = Callable[[str], object]
"""Takes one line that says what a worker is doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFindings:
    """Facts about a GPU that loading a model needs. Without a GPU they are the defaults.

    path: how peers will read KV.
    refused, draft_refused: parts of a GPU backend that the model and the draft model must not use, for
    `choose_backend`.
    """

    path: KvPathChoice = field(default_factory=lambda: KvPathChoice(path=KvPath.DIRECT, reason=""))
    refused: dict[str, str] = field(default_factory=dict)
    draft_refused: dict[str, str] = field(default_factory=dict)


def find_out_about_gpu(config: WorkerConfig, draft: WorkerConfig | None, say: Say) -> GpuFindings:
    """Measure the paths of KV and check the kernels of the model and of the draft model, both at once.

    Most of either is starting processes. What they compile is kept for the worker, see
    `share_compile_caches`. draft: as in `draft_config`. say: told what takes long. Raises ConfigError if
    torch's allocator does not allow NIXL, ModelError if there is no such model.
    """
    if not uses_gpu(config):
        return GpuFindings()
    report = logged(say)
    if config.transfer in ("nixl", "auto"):
        require_plain_segments(os.environ)
    share_compile_caches(os.environ)
    checked = [checked_model(each) for each in (config, draft) if each is not None]
    with ThreadPoolExecutor(1, thread_name_prefix="kv-path") as pool:
        path = pool.submit(kv_path_of, config, report)
        refused = [refused_of(model, report) for model in checked] if config.kernels == "auto" else []
        found = path.result()
    report(LOADING)
    own, of_draft = [*refused, {}, {}][:2]
    return GpuFindings(path=found, refused=own, draft_refused=of_draft)


def logged(say: Say) -> Say:
    """Return `say` that also logs what it is told."""

    def report(text: str) -> None:
        log.info("worker_starting", activity=text)
        say(text)

    return report


def kv_path_of(config: WorkerConfig, say: Say) -> KvPathChoice:
    """Return how peers will read the KV of a GPU; `DIRECT` without a reason where KV is not registered."""
    if config.transfer == "local":
        return KvPathChoice(path=KvPath.DIRECT, reason="")
    if config.transfer == "collective" and config.gpu_kv == "auto":
        return KvPathChoice(path=KvPath.DIRECT, reason="")
    return kv_path_for(config.gpu_kv, facts=path_facts() if config.gpu_kv == "auto" else {}, say=say)


def checked_model(config: WorkerConfig) -> "CheckedModel":
    """Return what a child process needs of a model. Raises ModelError if there is none."""
    from baton.model.gpu_check.check_backends import CheckedModel
    from baton.model.loading.model_source import resolve_model

    return CheckedModel(
        path=str(resolve_model(config.model)),
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        max_model_len=config.max_model_len,
        block_size_tokens=config.block_size_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=step_tokens_of(config),
    )


def refused_of(model: "CheckedModel", say: Say) -> dict[str, str]:
    """Return the parts of a GPU backend that this model must not use, with the reason."""
    from baton.model.gpu_check.gpu_verdicts import refused_gpu_stages

    return refused_gpu_stages(model, say=say)
