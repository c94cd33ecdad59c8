"""Tests which backend is chosen, and which one replaces it if it fails: each failure is one warning."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from transformers import Olmo2Config, PreTrainedConfig

from baton.core.errors import ModelError
from baton.core.kv.block_hash import token_ids
from baton.engine.state.step import StepPlan, StepSequence
from baton.model.attention.attention_inputs import CausalMasks
from baton.model.attention.paged_attention import paged_attention
from baton.model.backends import backend_selection, decoder_layers, fused_layers
from baton.model.backends.backend_selection import Backend, choose_backend, compiled_backend
from baton.model.backends.native_layers import prefers_native_gemm
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.kernels.cpu.kernel_build import KernelsUnavailable
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.step.forward import Forward, ModelForward
from baton.model.step.step_inputs import PreparedSequence, pack
from baton.model.torch_executor import TorchExecutor
from baton.model.verification.verify_backend import verify_logits
from tests.unit.model.conftest import TINY

SIZE = 16


@dataclass(frozen=True)
class Warned:
    event: str
    backend: str
    problem: str


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[Warned]:
    """Return the list to which each logged warning is added."""
    warned: list[Warned] = []

    class Log:
        def warning(self, event: str, *, problem: str, hint: str, backend: str = "") -> None:
            warned.append(Warned(event, backend, problem))

    monkeypatch.setattr(backend_selection, "log", Log())
    return warned


def skipped(warned: list[Warned]) -> list[str]:
    """Return the backends that were skipped, in order; every warning must be about one."""
    assert {warning.event for warning in warned} <= {"backend_not_verified"}
    return [warning.backend for warning in warned]


@pytest.fixture
def loaded(tiny_dir: Path) -> LoadedModel:
    return load_model(tiny_dir, device="cpu")


def chosen(loaded: LoadedModel, kernels: str = "auto") -> Backend:
    """Choose a backend and verify it once more."""
    backend = choose_backend(loaded, kernels=kernels, num_threads=1, block_size_tokens=SIZE)
    verify_logits(loaded, SIZE, kernel=backend.kernel, forward=backend.forward)
    backend.forward.close()
    return backend


@torch.inference_mode()
def logits_of(loaded: LoadedModel, forward: Forward) -> torch.Tensor:
    """Return the logits of each token of a prompt."""
    cache = KvCache.zeros(loaded.layout(SIZE), 4)
    prompt = PreparedSequence(
        seq_id=1, token_ids=np.arange(20), position_begin=0, kv_begin=0, block_ids=np.array([2, 0]), sample=None
    )
    step = pack([prompt], cache, CausalMasks(cache.dtype, cache.device), paged_attention)
    return forward(replace(step, sample_rows=torch.arange(20))).logits


def fail(*_arguments: Any, **_options: Any) -> NoReturn:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")


def test_the_fastest_backend_is_chosen_if_nothing_fails(
    loaded: LoadedModel, save: Callable[[PreTrainedConfig], Path], warned: list[Warned]
) -> None:
    assert chosen(loaded).name == "fused layers"
    assert chosen(load_model(save(Olmo2Config(**TINY)), device="cpu")).name == "native attention"
    assert chosen(loaded, "torch").name == "torch"
    assert not warned


@pytest.mark.parametrize("broken", ["FusedForward", "is_plain_decoder"])
def test_native_attention_is_chosen_if_fused_layers_cannot_be_built(
    broken: str, loaded: LoadedModel, warned: list[Warned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_selection, broken, fail)
    assert chosen(loaded).name == "native attention"
    assert set(skipped(warned)) <= {"native decoder", "fused layers"}
    assert "fused layers" in skipped(warned)
    assert warned[0].problem.startswith("AttributeError: ")


def test_fused_layers_are_chosen_if_the_native_decoder_cannot_be_built(
    tiny_dir: Path, warned: list[Warned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_selection, "prefers_native_gemm", lambda model, kernels: True)
    monkeypatch.setattr(backend_selection, "DecoderForward", fail)
    half = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    assert choose_backend(half, kernels="auto", num_threads=1, block_size_tokens=SIZE).name == "fused layers"
    assert skipped(warned) == ["native decoder"]


def test_a_backend_that_fails_during_construction_leaves_the_model_usable(
    loaded: LoadedModel, warned: list[Warned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights are already joined when it fails."""
    layers, before = iter(range(9)), decoder_layers._layer
    monkeypatch.setattr(decoder_layers, "_layer", lambda *given: before(*given) if next(layers) < 1 else fail())
    assert chosen(loaded).name == "native attention"
    assert skipped(warned) == ["fused layers"]


def test_fused_layers_with_wrong_logits_are_skipped(
    loaded: LoadedModel, warned: list[Warned], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fused_layers.rope_cos_sin
    monkeypatch.setattr(
        fused_layers, "rope_cos_sin", lambda rotary, positions: before(rotary, positions + 1000 * (positions > 3))
    )
    assert chosen(loaded).name == "native attention"
    assert skipped(warned) == ["fused layers"]
    assert "computes different logits" in warned[0].problem


def test_native_attention_with_wrong_logits_is_skipped(
    loaded: LoadedModel, warned: list[Warned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_selection, "FusedForward", fail)
    monkeypatch.setattr(
        backend_selection,
        "paged_kernel",
        lambda _: lambda query, layer, step, scaling, window: query.transpose(0, 1).contiguous(),
    )
    assert chosen(loaded).name == "torch"
    assert skipped(warned) == ["fused layers", "native attention"]


@pytest.mark.parametrize(
    "error", [KernelsUnavailable("no C++ compiler"), AttributeError("undefined symbol: baton_rms_norm")]
)
def test_torch_is_chosen_if_the_kernels_are_unavailable(
    error: Exception, loaded: LoadedModel, warned: list[Warned], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_num_threads: int) -> NoReturn:
        raise error

    monkeypatch.setattr(backend_selection, "load_kernels", refuse)
    assert chosen(loaded).name == "torch"
    assert [warning.event for warning in warned] == ["kernels_unavailable"]
    assert str(error) in warned[0].problem


def test_a_model_that_no_backend_serves_is_refused(
    loaded: LoadedModel, warned: list[Warned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every verification fails. The error is that of the last one."""

    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        raise ModelError("computes different logits")

    monkeypatch.setattr(backend_selection, "verify_logits", refuse)
    with pytest.raises(ModelError, match="computes different logits"):
        choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    assert skipped(warned) == ["fused layers", "native attention"]


@pytest.mark.parametrize("native_allowed", [False, True])
def test_packed_weights_are_freed_in_the_model(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, native_allowed: bool
) -> None:
    """The model keeps the weights that were not packed, and everything that callers of `LoadedModel` use."""
    loaded = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    is_native = prefers_native_gemm(loaded.model, load_kernels(1)) and native_allowed
    monkeypatch.setattr(backend_selection, "prefers_native_gemm", lambda model, kernels: is_native)
    packs = is_native or fused_layers.has_onednn_bf16_gemm(loaded.dtype)  # this build of torch, on this processor
    layout = loaded.layout(SIZE)
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    assert backend.name == ("native decoder" if is_native else "fused layers")
    left = {name for name, parameter in loaded.model.named_parameters() if parameter.numel()}
    names = {name for name, _ in loaded.model.named_parameters()}
    assert left == ({name for name in names if "norm" in name or "embed_tokens" in name} if packs else names)
    assert (loaded.dtype, loaded.device, loaded.layout(SIZE)) == (torch.bfloat16, torch.device("cpu"), layout)
    if packs:
        with pytest.raises(ModelError, match="cannot run"), closing(ModelForward(loaded.model)) as own:
            verify_logits(loaded, SIZE, forward=own)


def test_weights_that_are_not_packed_stay_in_the_model(loaded: LoadedModel) -> None:
    choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    assert all(parameter.numel() for parameter in loaded.model.parameters())
    attention = loaded.model.base_model.layers[0].self_attn
    storages = {
        module.weight.untyped_storage().data_ptr() for module in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert len(storages) == 1, "the model's weights must be views of the joined weight"


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=[pytest.mark.long, pytest.mark.timeout(300)])]
)
def test_compiled_layers_compute_what_the_model_does(loaded: LoadedModel, warned: list[Warned], backend: str) -> None:
    """The `eager` backend only traces."""
    own = logits_of(loaded, ModelForward(loaded.model))
    compiled = compiled_backend(loaded, paged_attention, "torch", SIZE, backend=backend)
    assert compiled is not None
    assert (compiled.name, warned) == ("torch, compiled", [])
    torch.testing.assert_close(logits_of(loaded, compiled.forward), own, atol=1e-5, rtol=1e-5)
    assert not any("_compiled_call_impl" in vars(layer) for layer in loaded.model.base_model.layers), (
        "outside of steps the model must be uncompiled"
    )
    compiled.forward.close()


def test_no_step_compiles_after_warmup(loaded: LoadedModel) -> None:
    backend = compiled_backend(loaded, paged_attention, "torch", SIZE, backend="eager")
    assert backend is not None
    executor = TorchExecutor(
        loaded.model, KvCache.zeros(loaded.layout(SIZE), 16), thread=compute_thread(1), backend=backend
    )
    try:
        executor.warm(4)
        with torch.compiler.set_stance("fail_on_recompile"):
            for tokens in ([3], [3, 4, 5], list(range(40)), [7, 8], [1] * 17):
                part = StepSequence(
                    seq_id=1,
                    token_ids=token_ids(tokens),
                    position_begin=0,
                    kv_begin=0,
                    block_table=tuple(range(16)),
                    sample=None,
                )
                assert not executor.run(StepPlan(step_id=1, sequences=(part,))).failures
    finally:
        torch.compiler.set_stance("default")
        executor.close()


def test_compiled_backend_returns_none_if_compilation_fails(loaded: LoadedModel, warned: list[Warned]) -> None:
    assert compiled_backend(loaded, paged_attention, "torch", SIZE, backend="no such compiler") is None
    assert skipped(warned) == ["torch, compiled"]
    assert logits_of(loaded, ModelForward(loaded.model)).isfinite().all()
