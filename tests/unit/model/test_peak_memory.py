"""Tests that the memory of a step is measured, and that models that do not fit are refused with the
numbers."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3Config

from baton.core.errors import ModelError
from baton.model import peak_memory
from baton.model.backends.backend_selection import CpuBackends, choose_backend
from baton.model.device.device_info import gpu_share_bytes
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_fingerprint import num_weights
from baton.model.loading.model_loader import load_model
from baton.model.peak_memory import KEPT_S, known_step_bytes, measure_step_bytes
from baton.model.step.forward import Forward, ForwardOutput
from baton.runtime.child.verdict_cache import VerdictCache
from tests.model_families import TINY

SIZE = 16
WIDE = TINY | {"vocab_size": 60_000}


def test_step_bytes_cover_logits_and_grow_with_tokens(save: Callable[[PreTrainedConfig], Path]) -> None:
    loaded = load_model(save(Qwen3Config(**WIDE, head_dim=16)), device="cpu")
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)

    def step_bytes(num_tokens: int, num_seqs: int) -> int:
        return measure_step_bytes(
            loaded, backend, block_size_tokens=SIZE, max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs
        )

    logits = 64 * WIDE["vocab_size"] * 4
    assert logits < step_bytes(64, 64) < 20 * logits
    assert step_bytes(4096, 1) > 4096 * TINY["hidden_size"] * 2


def test_step_bytes_on_a_host_are_measured_once_a_day_for_each_limit(
    save: Callable[[PreTrainedConfig], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits, threads and the backend tell workers apart. Old and damaged files are not used."""
    loaded = load_model(save(Qwen3Config(**TINY, head_dim=16)), device="cpu")
    backend = choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=SIZE)
    measured: list[int] = []

    def count(*given: Any, max_num_seqs: int, **limits: Any) -> int:
        measured.append(max_num_seqs)
        return 1000 * max_num_seqs

    def is_measured(max_num_seqs: int = 4, *, num_threads: int = 1, name: str = "torch", now_s: float = 0.0) -> bool:
        before = len(measured)
        found = known_step_bytes(
            loaded,
            replace(backend, name=name),
            block_size_tokens=SIZE,
            max_num_batched_tokens=64,
            max_num_seqs=max_num_seqs,
            num_threads=num_threads,
            cache=VerdictCache(tmp_path / "kept"),
            wall_clock=lambda: now_s,
        )
        assert found == 1000 * max_num_seqs
        return len(measured) > before

    monkeypatch.setattr(peak_memory, "measure_step_bytes", count)
    assert [is_measured(each) for each in (4, 4, 8, 4)] == [True, False, True, False]
    assert [is_measured(num_threads=2), is_measured(name="other")] == [True, True]
    assert [is_measured(now_s=KEPT_S - 1), is_measured(now_s=KEPT_S), is_measured(now_s=1.0)] == [False, True, True]
    for bad in ("-1", "true", '"4000"', "null"):
        for file in (tmp_path / "kept").glob("*.json"):
            file.write_text(file.read_text().replace('"bytes": 4000', f'"bytes": {bad}'))
        assert is_measured(now_s=1.0)


def test_garbage_that_is_collected_during_the_step_does_not_hide_its_memory(
    save: Callable[[PreTrainedConfig], Path],
) -> None:
    loaded = load_model(save(Qwen3Config(**TINY, head_dim=16)), device="cpu")
    backend = choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=SIZE)

    def collect_and_forward(*given: Any, **options: Any) -> ForwardOutput:
        gc.collect()
        return backend.forward(*given, **options)

    cycle: list[Any] = [torch.ones(25_000_000)]  # 100 MB
    cycle.append(cycle)
    del cycle
    step_bytes = measure_step_bytes(
        loaded,
        replace(backend, forward=cast(Forward, collect_and_forward)),
        block_size_tokens=SIZE,
        max_num_batched_tokens=4096,
        max_num_seqs=1,
    )
    assert step_bytes > 4096 * TINY["hidden_size"] * 2


def test_out_of_memory_in_the_largest_step_is_refused(
    save: Callable[[PreTrainedConfig], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(save(Qwen3Config(**TINY, head_dim=16)), device="cpu")
    backend = choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=SIZE)

    def full(*_: object) -> ForwardOutput:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nand more")

    refusal = r"no memory on cpu for a step of 64 tokens of 4 sequences: .*Tried to allocate 1 GiB\)"
    limits = {"block_size_tokens": SIZE, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with pytest.raises(ModelError, match=refusal):
        measure_step_bytes(loaded, replace(backend, forward=cast(Forward, full)), **limits)
    monkeypatch.setattr(KvCache, "zeros", full)
    with pytest.raises(ModelError, match=refusal):
        measure_step_bytes(loaded, backend, **limits)


def test_step_whose_kv_does_not_fit_is_refused_before_it_is_allocated(
    save: Callable[[PreTrainedConfig], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(save(Qwen3Config(**TINY, head_dim=16)), device="cpu")
    backend = choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=SIZE)
    monkeypatch.delattr(KvCache, "zeros")
    with pytest.raises(
        ModelError, match=r"its KV takes 2 MiB, and 0 MiB are free: give a smaller --max-num-batched-to"
    ):
        measure_step_bytes(
            loaded,
            backend,
            block_size_tokens=SIZE,
            max_num_batched_tokens=4096,
            max_num_seqs=1,
            free_bytes=lambda device: 1000,
        )


def test_weights_that_do_not_fit_are_refused_with_the_numbers(tiny_dir: Path) -> None:
    loaded = load_model(tiny_dir, device="cpu")
    assert num_weights(tiny_dir) == sum(parameter.numel() for parameter in loaded.model.parameters())
    with pytest.raises(
        ModelError, match=r"weights in float32 take \d+ MiB, and 0 MiB are free on cpu: give a smaller model"
    ):
        load_model(tiny_dir, device="cpu", free_bytes=lambda device: 1000)


def test_weights_for_a_gpu_must_fit_host_memory(tiny_dir: Path) -> None:
    """The device `meta` stands for a GPU with much memory."""
    with pytest.raises(ModelError, match="0 MiB are free on this host, through which they go to meta"):
        load_model(tiny_dir, device="meta", free_bytes=lambda device: 1000 if device.type == "cpu" else 2**40)


@pytest.mark.parametrize(("free", "taken", "left"), [(60, 20, 20), (15, 20, 15), (60, 45, 0)])
def test_workers_sharing_a_gpu_get_equal_parts(free: int, taken: int, left: int) -> None:
    """The GPU has 80 bytes, of which this worker has allocated `taken`.

    The first of two workers leaves the other its half, and counts what the other has allocated as lost.
    """
    assert gpu_share_bytes(free, 80, taken, 2) == left
    assert gpu_share_bytes(free, 80, taken, 1) == min(free, 80 - taken)


def test_weights_are_not_packed_if_two_copies_do_not_fit(tiny_dir: Path) -> None:
    loaded = load_model(tiny_dir, device="cpu")
    little = CpuBackends(free_bytes=lambda device: 1000)
    with torch.inference_mode():
        backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE, cpu_backends=little)
    assert backend.name in ("native attention", "torch")
