"""Finds out about a GPU before a model is loaded, with child processes that need its memory."""

import os

from baton.runtime.config.settings import WorkerConfig
from baton.worker.device.gpu_allocator import require_plain_segments
from baton.worker.device.gpu_use import step_tokens_of, uses_gpu
from baton.worker.device.kv_path import KvPath, KvPathChoice, kv_path_for, path_facts


def kv_path_of(config: WorkerConfig) -> KvPathChoice:
    """Return how peers will read the KV of a GPU; `DIRECT` without a reason on a CPU.

    Raises ConfigError if torch's allocator does not allow it.
    """
    if config.transfer != "nixl" or not uses_gpu(config):
        return KvPathChoice(path=KvPath.DIRECT, reason="")
    require_plain_segments(os.environ)
    return kv_path_for(config.gpu_kv, facts=path_facts() if config.gpu_kv == "auto" else {})


def refused_on_gpu(config: WorkerConfig | None) -> dict[str, str]:
    """Return the parts of a GPU backend that a model must not use, for `choose_backend`; none on a CPU.

    `config`: with the model and how it is run; None: there is no model. Raises ModelError if there is no such
    model.
    """
    if config is None or config.kernels != "auto" or not uses_gpu(config):
        return {}
    from baton.model.gpu_check.check_backends import CheckedModel
    from baton.model.gpu_check.gpu_verdicts import refused_gpu_stages
    from baton.model.loading.model_source import resolve_model

    return refused_gpu_stages(
        CheckedModel(
            path=str(resolve_model(config.model)),
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            max_model_len=config.max_model_len,
            block_size_tokens=config.block_size_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=step_tokens_of(config),
        )
    )
