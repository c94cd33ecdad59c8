"""Tests which backend is chosen, and which one replaces it if it fails: each failure is one warning."""

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, JetMoeConfig, PreTrainedConfig, Starcoder2Config

from baton.core.errors import ModelError
from baton.core.kv.block_hash import token_ids
from baton.engine.state.step import StepPlan, StepSequence
from baton.model.attention.attention_inputs import AttentionStep, CausalMasks
from baton.model.attention.paged_attention import paged_attention
from baton.model.backends import backend_selection, fused_layers
from baton.model.backends.backend_selection import (
    CPU_BACKENDS,
    FUSED_LAYERS,
    NATIVE_ATTENTION,
    NATIVE_DECODER,
    Backend,
    CpuBackend,
    CpuBackends,
    choose_backend,
    compiled_backend,
)
from baton.model.backends.native_layers import prefers_native_gemm
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.forms.decoder_form import DecoderForm
from baton.model.kernels.cpu.kernel_build import KernelsUnavailable
from baton.model.kernels.cpu.kernel_library import Kernels, load_kernels
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.step.forward import Forward, ForwardOutput, ModelForward
from baton.model.step.step_inputs import PackedStep, PreparedSequence, pack
from baton.model.torch_executor import TorchExecutor
from baton.model.verification.verify_backend import verify_logits
from tests.model_families import TINY

SIZE = 16


@dataclass(frozen=True)
class Warned:
    event: str
    backend: str
    problem: str


class Warnings:
    """The warnings that the selection has logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __call__(self) -> list[Warned]:
        lines: list[Any] = [
            record.msg
            for record in self._caplog.records
            if record.name == backend_selection.__name__ and record.levelname == "WARNING"
        ]
        assert all(line["level"] == "warning" and line["hint"] for line in lines)
        return [Warned(line["event"], line.get("backend", ""), line["problem"]) for line in lines]

    def skipped(self) -> list[str]:
        """Return the backends that were skipped, in order; every warning must be about one."""
        assert {warning.event for warning in self()} <= {"backend_not_verified"}
        return [warning.backend for warning in self()]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Warnings:
    return Warnings(caplog)


@pytest.fixture
def loaded(tiny_dir: Path) -> LoadedModel:
    return load_model(tiny_dir, device="cpu")


def chosen(loaded: LoadedModel, kernels: str = "auto", cpu_backends: CpuBackends = CPU_BACKENDS) -> Backend:
    """Choose a backend and verify it once more."""
    backend = choose_backend(loaded, kernels=kernels, num_threads=1, block_size_tokens=SIZE, cpu_backends=cpu_backends)
    verify_logits(loaded, SIZE, kernel=backend.kernel, forward=backend.forward)
    backend.forward.close()
    return backend


def backends_with(*changed: CpuBackend) -> CpuBackends:
    """Return the backends for a CPU, of which some are changed."""
    by_name = {backend.name: backend for backend in changed}
    return replace(CPU_BACKENDS, fastest_first=tuple(by_name.get(own.name, own) for own in CPU_BACKENDS.fastest_first))


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
    loaded: LoadedModel, save: Callable[[PreTrainedConfig], Path], warned: Warnings
) -> None:
    assert chosen(loaded).name == "fused layers"
    assert chosen(load_model(save(Starcoder2Config(**TINY)), device="cpu")).name == "native attention"
    assert chosen(loaded, "torch").name == "torch"
    assert not warned()


def test_weights_that_only_the_model_itself_can_multiply_are_named(
    save: Callable[[PreTrainedConfig], Path], warned: Warnings
) -> None:
    """Those of JetMoE, which is refused with more than one expert a token. Routers alone are no warning."""
    sizes = {name: size for name, size in TINY.items() if name != "num_attention_heads"}
    config = JetMoeConfig(**sizes, num_experts_per_tok=1, num_local_experts=4, kv_channels=32)
    chosen(load_model(save(config), device="cpu"))
    (warning,) = warned()
    assert warning.event == "weights_of_unknown_form"
    assert re.fullmatch(r"\d\d% of the weights are in JetMoeParallelExperts", warning.problem)
    chosen(
        load_model(save(GptOssConfig(**TINY, head_dim=16, num_local_experts=4, num_experts_per_tok=2)), device="cpu")
    )
    assert len(warned()) == 1


@pytest.mark.parametrize("broken", ["build", "serves"])
def test_native_attention_is_chosen_if_fused_layers_cannot_be_built(
    broken: str, loaded: LoadedModel, warned: Warnings
) -> None:
    broken_layers = replace(FUSED_LAYERS, **{broken: fail})
    assert chosen(loaded, cpu_backends=backends_with(broken_layers)).name == "native attention"
    assert warned.skipped() == ["fused layers"]
    assert warned()[0].problem.startswith("AttributeError: ")


def test_another_backend_is_chosen_if_the_native_decoder_cannot_be_built(tiny_dir: Path, warned: Warnings) -> None:
    broken = replace(NATIVE_DECODER, serves=lambda loaded, form, kernels: True, build=fail)
    half = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    backend = choose_backend(
        half, kernels="auto", num_threads=1, block_size_tokens=SIZE, cpu_backends=backends_with(broken)
    )
    is_native = prefers_native_gemm(torch.bfloat16, load_kernels(1))  # its linear layers are packed then
    assert backend.name == ("native products" if is_native else "fused layers")
    assert warned.skipped() == ["native decoder"]


def test_a_backend_that_fails_during_construction_leaves_the_model_usable(
    loaded: LoadedModel, warned: Warnings
) -> None:
    """Some weights are already joined when it fails."""

    def build(loaded: LoadedModel, form: DecoderForm | None, kernels: Kernels) -> Backend:
        """Fail at the output layer, which is missing."""
        assert form is not None
        return FUSED_LAYERS.build(loaded, replace(form, head=None), kernels)

    before = loaded.model.base_model.layers[0].self_attn.q_proj.weight.data_ptr()
    assert chosen(loaded, cpu_backends=backends_with(replace(FUSED_LAYERS, build=build))).name == "native attention"
    assert warned.skipped() == ["fused layers"]
    assert loaded.model.base_model.layers[0].self_attn.q_proj.weight.data_ptr() != before, "nothing was joined"


def test_fused_layers_with_wrong_logits_are_skipped(loaded: LoadedModel, warned: Warnings) -> None:
    @dataclass
    class WrongPositions:
        """Runs the layers with other positions after the fourth token."""

        own: Forward

        def __call__(self, step: PackedStep) -> ForwardOutput:
            return self.own(replace(step, position_ids=step.position_ids + 1000 * (step.position_ids > 3)))

        def close(self) -> None:
            self.own.close()

    def build(loaded: LoadedModel, form: DecoderForm | None, kernels: Kernels) -> Backend:
        backend = FUSED_LAYERS.build(loaded, form, kernels)
        return replace(backend, forward=WrongPositions(backend.forward))

    assert chosen(loaded, cpu_backends=backends_with(replace(FUSED_LAYERS, build=build))).name == "native attention"
    assert warned.skipped() == ["fused layers"]
    assert "computes different logits" in warned()[0].problem


def test_native_attention_with_wrong_logits_is_skipped(loaded: LoadedModel, warned: Warnings) -> None:
    def no_attention(
        query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None, *_sinks: object
    ) -> torch.Tensor:
        return query.transpose(0, 1).contiguous()

    def build(loaded: LoadedModel, form: DecoderForm | None, kernels: Kernels) -> Backend:
        return replace(NATIVE_ATTENTION.build(loaded, form, kernels), kernel=no_attention)

    backends = backends_with(replace(FUSED_LAYERS, build=fail), replace(NATIVE_ATTENTION, build=build))
    assert chosen(loaded, cpu_backends=backends).name == "torch"
    assert warned.skipped() == ["fused layers", "native attention"]


@pytest.mark.parametrize(
    "error", [KernelsUnavailable("no C++ compiler"), AttributeError("undefined symbol: baton_rms_norm")]
)
def test_torch_is_chosen_if_the_kernels_are_unavailable(
    error: Exception, loaded: LoadedModel, warned: Warnings
) -> None:
    def refuse(_num_threads: int) -> NoReturn:
        raise error

    assert chosen(loaded, cpu_backends=CpuBackends(load=refuse)).name == "torch"
    assert [warning.event for warning in warned()] == ["kernels_load_failed"]
    assert str(error) in warned()[0].problem


def test_a_model_that_no_backend_serves_is_refused(loaded: LoadedModel, warned: Warnings) -> None:
    """Every verification fails, because the model's own logits depend on the number of tokens in a pass."""
    loaded.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.roll(logits.shape[1], -1))
    with pytest.raises(ModelError, match="computes different logits"):
        choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    assert warned.skipped() == ["fused layers", "native attention"]
    assert all("computes different logits" in warning.problem for warning in warned())


@pytest.mark.parametrize("native_allowed", [False, True])
def test_packed_weights_are_freed_in_the_model(tiny_dir: Path, native_allowed: bool) -> None:
    """The model keeps the weights that were not packed, and everything that callers of `LoadedModel` use."""
    loaded = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    is_native = prefers_native_gemm(loaded.dtype, load_kernels(1))
    own = NATIVE_DECODER.serves
    backends = backends_with(replace(NATIVE_DECODER, serves=lambda *facts: native_allowed and own(*facts)))
    packs = is_native or fused_layers.has_onednn_bf16_gemm(loaded.dtype)  # this build of torch, on this processor
    layout = loaded.layout(SIZE)
    names = {name for name, _ in loaded.model.named_parameters()}
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE, cpu_backends=backends)
    native = "native decoder" if native_allowed else "native products"
    assert backend.name == (native if is_native else "fused layers")
    left = {name for name, parameter in loaded.model.named_parameters() if parameter.numel()}
    assert left == ({name for name in names if "norm" in name or "embed_tokens" in name} if packs else names)
    assert (loaded.dtype, loaded.device, loaded.layout(SIZE)) == (torch.bfloat16, torch.device("cpu"), layout)
    with closing(ModelForward(loaded.model)) as forward:
        if is_native:
            verify_logits(loaded, SIZE, forward=forward)
        elif packs:
            with pytest.raises(ModelError, match="cannot run"):
                verify_logits(loaded, SIZE, forward=forward)


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
def test_compiled_layers_compute_what_the_model_does(loaded: LoadedModel, warned: Warnings, backend: str) -> None:
    """The `eager` backend only traces."""
    own = logits_of(loaded, ModelForward(loaded.model))
    compiled = compiled_backend(loaded, paged_attention, "torch", SIZE, backend=backend)
    assert compiled is not None
    assert (compiled.name, warned()) == ("torch, compiled", [])
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


def test_compiled_backend_returns_none_if_compilation_fails(loaded: LoadedModel, warned: Warnings) -> None:
    assert compiled_backend(loaded, paged_attention, "torch", SIZE, backend="no such compiler") is None
    assert warned.skipped() == ["torch, compiled"]
    assert logits_of(loaded, ModelForward(loaded.model)).isfinite().all()
