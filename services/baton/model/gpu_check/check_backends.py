"""The child's side: verifies each part of a GPU backend on a reduced model with random weights."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from baton.core.errors import ModelError
from baton.model.backends.backend_selection import (
    COMPILED,
    GRAPHS,
    TRITON,
    Backend,
    build_compiled_backend,
    graphed_backend,
    triton_backend,
)
from baton.model.backends.compiled_layers import CompiledForward
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import DTYPE_NAMES, KvCache
from baton.model.gpu_check.reduced_config import reduced_config
from baton.model.loading.model_loader import LoadedModel, load_model, text_config_and_dtype
from baton.model.loading.random_init import init_model
from baton.model.peak_memory import measure_step_bytes
from baton.model.step.forward import ModelForward
from baton.model.torch_executor import TorchExecutor
from baton.model.verification.verify_backend import Windows, verify_masks
from baton.runtime.child.stages import Report, StageRunner

NUM_BLOCKS = 64
FINGERPRINT = "reduced"
"""Fingerprint of all reduced models. Their KV never leaves the child, so their weights are not hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """The model that a worker is about to load, in what a child needs of it.

    The fields are as in `load_model` and `ComputeSettings`.
    """

    path: str
    dtype: str
    kv_dtype: str
    max_model_len: int | None
    block_size_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendBuilders:
    """Functions that build and verify the parts of a GPU backend. Tests replace them.

    compiled_before: makes the compiled layers that another child has verified.
    """

    triton: Callable[[LoadedModel, int, Windows], Backend] = triton_backend
    compiled_before: Callable[[PreTrainedModel], ModelForward] = CompiledForward
    compiled: Callable[..., Backend] = build_compiled_backend
    graphed: Callable[[LoadedModel, Backend, int, Windows], Backend] = graphed_backend


def check(payload: Mapping[str, Any], report: Report) -> None:
    """Verify the parts that are not judged yet, see `StageRunner`; called in a child process.

    payload: `model`, `known`, and `scratch`, a directory that the parent removes.
    """
    model = CheckedModel(**payload["model"])
    directory = Path(payload["scratch"]) / str(os.getpid())

    def run() -> None:
        check_parts(load_reduced(model, directory), model, StageRunner(payload["known"], report), BackendBuilders())

    compute_thread(1).submit(run).result()  # as in a worker, where one thread does all computing


def load_reduced(model: CheckedModel, directory: Path) -> LoadedModel:
    """Write a reduced model with random weights and load it."""
    config, dtype = text_config_and_dtype(Path(model.path), model.dtype)
    config = reduced_config(config)
    init_model(config, directory)
    longest = config.max_position_embeddings
    return load_model(
        directory,
        dtype=DTYPE_NAMES[dtype],
        kv_dtype=model.kv_dtype,
        device=model.device,
        max_model_len=None if model.max_model_len is None else min(longest, model.max_model_len),
        fingerprint=FINGERPRINT,
    )


def check_parts(loaded: LoadedModel, model: CheckedModel, stages: StageRunner, build: BackendBuilders) -> None:
    """Run the stages in the order in which `choose_backend` uses the parts."""
    size = model.block_size_tokens
    windows = tuple(params.window for params in verify_masks(loaded, size))
    found: dict[str, Backend] = {}

    def triton() -> None:
        found[TRITON] = build.triton(loaded, size, windows)
        run_all_kinds_of_steps(loaded, found[TRITON], model, windows)

    def compiled() -> None:
        found[COMPILED] = build.compiled(loaded, found[TRITON].kernel, TRITON, size, windows)
        run_all_kinds_of_steps(loaded, found[COMPILED], model, windows)

    def graphs() -> None:
        base = found.get(COMPILED, found[TRITON])
        run_all_kinds_of_steps(loaded, build.graphed(loaded, base, size, windows), model, windows)

    if not stages.run(TRITON, triton):
        return
    if TRITON not in found:  # judged by a child before this one
        found[TRITON] = build.triton(loaded, size, windows)
    if stages.run(COMPILED, compiled) and COMPILED not in found:
        found[COMPILED] = replace(found[TRITON], forward=build.compiled_before(loaded.model))
    stages.run(GRAPHS, graphs)


def run_all_kinds_of_steps(loaded: LoadedModel, backend: Backend, model: CheckedModel, windows: Windows) -> None:
    """Run what a worker runs before its first request: its largest step, and each kind of step that compiles.

    windows: of each layer, from which block tables follow.
    Raises ModelError if what was written is not finite.
    """
    measure_step_bytes(
        loaded,
        backend,
        block_size_tokens=model.block_size_tokens,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_num_seqs=model.max_num_seqs,
    )
    layout = loaded.layout(model.block_size_tokens, windows)
    cache = KvCache.zeros(layout, NUM_BLOCKS, loaded.device, loaded.dtype)
    later = replace(backend, after_warmup=lambda: None)  # another part is still to be compiled
    thread = ThreadPoolExecutor(1)  # which the executor does not use to warm up
    TorchExecutor(loaded.model, cache, thread=thread, backend=later).warm(model.max_num_seqs)
    thread.shutdown()
    if loaded.device.type == "cuda":
        torch.cuda.synchronize(loaded.device)  # errors of kernels show now
    kv = cache.layers[0]
    written = kv.keys if kv.key_scales is None else kv.key_scales  # of integers, only scales can be NaN
    if not bool(torch.isfinite(written[0].float()).all()):
        raise ModelError("a step at start wrote keys that are not finite")
