"""Which way is taken, and what is taken where one fails: each failure is one line in the log, and the model
is served all the same."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
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
from baton.model.backends.native_layers import can_decode
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.kernels.cpu.kernel_build import NoKernels
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.step.forward import Forward, ModelForward
from baton.model.step.step_inputs import Part, pack
from baton.model.torch_executor import TorchExecutor
from baton.model.verification.verify_backend import verify_logits
from tests.unit.model.conftest import TINY

SIZE = 16


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(event, problem) of each warning."""
    events: list[tuple[str, str]] = []

    class Log:
        def warning(self, event: str, *, problem: str, hint: str) -> None:
            events.append((event, problem))

    monkeypatch.setattr(backend_selection, "log", Log())
    return events


@pytest.fixture
def loaded(tiny_dir: Path) -> LoadedModel:
    return load_model(tiny_dir, device="cpu")


def chosen(loaded: LoadedModel, kernels: str = "auto") -> Backend:
    """The way taken, which is proven once more."""
    way = choose_backend(loaded, kernels=kernels, num_threads=1, block_size_tokens=SIZE)
    verify_logits(loaded, SIZE, kernel=way.kernel, forward=way.forward)
    way.forward.close()
    return way


@torch.inference_mode()
def logits_of(loaded: LoadedModel, forward: Forward) -> torch.Tensor:
    """Of each token of a prompt."""
    cache = KvCache.zeros(loaded.layout(SIZE), 4)
    prompt = Part(
        seq_id=1, token_ids=np.arange(20), position_begin=0, kv_begin=0, block_ids=np.array([2, 0]), sample=None
    )
    step = pack([prompt], cache, CausalMasks(cache.dtype, cache.device), paged_attention)
    return forward(replace(step, sample_rows=torch.arange(20))).logits


def fail(*_arguments: Any, **_options: Any) -> NoReturn:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")


def test_the_fastest_where_nothing_fails(
    loaded: LoadedModel, save: Callable[[PreTrainedConfig], Path], said: list[tuple[str, str]]
) -> None:
    assert chosen(loaded).name == "our kernels"
    assert chosen(load_model(save(Olmo2Config(**TINY)), device="cpu")).name == "our attention"
    assert chosen(loaded, "torch").name == "torch"
    assert not said


@pytest.mark.parametrize("broken", ["FusedForward", "can_fuse"])
def test_a_decoder_that_cannot_be_built(
    broken: str, loaded: LoadedModel, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_selection, broken, fail)
    assert chosen(loaded).name == "our attention"
    assert {event for event, _ in said} == {"not_fused"}
    assert said[0][1].startswith("AttributeError: ")


def test_where_the_whole_decoder_cannot_be_built_the_other_one_is_taken(
    tiny_dir: Path, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_selection, "can_decode", lambda model, kernels: True)
    monkeypatch.setattr(backend_selection, "DecoderForward", fail)
    half = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    assert choose_backend(half, kernels="auto", num_threads=1, block_size_tokens=SIZE).name == "our kernels"
    assert [event for event, _ in said] == ["not_fused"]


def test_a_decoder_that_fails_half_way_leaves_the_model_whole(
    loaded: LoadedModel, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the weights are joined by then."""
    layers, before = iter(range(9)), decoder_layers._layer
    monkeypatch.setattr(decoder_layers, "_layer", lambda *given: before(*given) if next(layers) < 1 else fail())
    assert chosen(loaded).name == "our attention"
    assert [event for event, _ in said] == ["not_fused"]


def test_a_decoder_that_is_not_proven(
    loaded: LoadedModel, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fused_layers.turns
    monkeypatch.setattr(
        fused_layers, "turns", lambda rotary, positions: before(rotary, positions + 1000 * (positions > 3))
    )
    assert chosen(loaded).name == "our attention"
    assert [event for event, _ in said] == ["not_fused"]
    assert "computes something else" in said[0][1]


def test_an_attention_that_is_not_proven(
    loaded: LoadedModel, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_selection, "FusedForward", fail)
    monkeypatch.setattr(
        backend_selection,
        "kernel_of",
        lambda _: lambda query, layer, step, scaling, window: query.transpose(0, 1).contiguous(),
    )
    assert chosen(loaded).name == "torch"
    assert [event for event, _ in said] == ["not_fused", "kernels_not_proven"]


@pytest.mark.parametrize("error", [NoKernels("no C++ compiler"), AttributeError("undefined symbol: baton_rms_norm")])
def test_kernels_that_cannot_be_had(
    error: Exception, loaded: LoadedModel, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_num_threads: int) -> NoReturn:
        raise error

    monkeypatch.setattr(backend_selection, "load_kernels", refuse)
    assert chosen(loaded).name == "torch"
    assert [event for event, _ in said] == ["no_kernels"]
    assert str(error) in said[0][1]


def test_a_model_that_cannot_be_served_at_all(
    loaded: LoadedModel, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every proof fails; the last one's reason is what the worker ends with."""

    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        raise ModelError("computes something else")

    monkeypatch.setattr(backend_selection, "verify_logits", refuse)
    with pytest.raises(ModelError, match="computes something else"):
        choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    assert [event for event, _ in said] == ["not_fused", "kernels_not_proven"]


@pytest.mark.parametrize("is_whole_allowed", [False, True])
def test_packed_weights_are_held_once(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, is_whole_allowed: bool) -> None:
    """What is left of the model after its choice: what was not packed, and all that is asked of a loaded
    model."""
    loaded = load_model(tiny_dir, dtype="bfloat16", device="cpu")
    is_whole = can_decode(loaded.model, load_kernels(1)) and is_whole_allowed
    monkeypatch.setattr(backend_selection, "can_decode", lambda model, kernels: is_whole)
    packs = is_whole or fused_layers.has_onednn_products(loaded.dtype)  # this build of torch, on this processor
    layout = loaded.layout(SIZE)
    way = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    assert way.name == ("our decoder" if is_whole else "our kernels")
    left = {name for name, parameter in loaded.model.named_parameters() if parameter.numel()}
    names = {name for name, _ in loaded.model.named_parameters()}
    assert left == ({name for name in names if "norm" in name or "embed_tokens" in name} if packs else names)
    assert (loaded.dtype, loaded.device, loaded.layout(SIZE)) == (torch.bfloat16, torch.device("cpu"), layout)
    if packs:
        with pytest.raises(ModelError, match="cannot run"), closing(ModelForward(loaded.model)) as own:
            verify_logits(loaded, SIZE, forward=own)


def test_weights_that_are_not_packed_stay_the_models_own(loaded: LoadedModel) -> None:
    choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=SIZE)
    assert all(parameter.numel() for parameter in loaded.model.parameters())
    attention = loaded.model.base_model.layers[0].self_attn
    storages = {
        module.weight.untyped_storage().data_ptr() for module in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert len(storages) == 1, "the model has views of what was joined"


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=[pytest.mark.long, pytest.mark.timeout(300)])]
)
def test_compiled_layers_compute_what_the_model_does(
    loaded: LoadedModel, said: list[tuple[str, str]], backend: str
) -> None:
    """The quick one only traces."""
    own = logits_of(loaded, ModelForward(loaded.model))
    way = compiled_backend(loaded, paged_attention, "torch", SIZE, backend=backend)
    assert way is not None
    assert (way.name, said) == ("torch, compiled", [])
    torch.testing.assert_close(logits_of(loaded, way.forward), own, atol=1e-5, rtol=1e-5)
    assert not any("_compiled_call_impl" in vars(layer) for layer in loaded.model.base_model.layers), (
        "the model itself is as it was"
    )
    way.forward.close()


def test_no_step_waits_for_a_compiler_once_all_kinds_have_run(loaded: LoadedModel) -> None:
    way = compiled_backend(loaded, paged_attention, "torch", SIZE, backend="eager")
    assert way is not None
    executor = TorchExecutor(loaded.model, KvCache.zeros(loaded.layout(SIZE), 16), thread=compute_thread(1), way=way)
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


def test_layers_that_cannot_be_compiled(loaded: LoadedModel, said: list[tuple[str, str]]) -> None:
    assert compiled_backend(loaded, paged_attention, "torch", SIZE, backend="no such compiler") is None
    assert [event for event, _ in said] == ["not_compiled"]
    assert logits_of(loaded, ModelForward(loaded.model)).isfinite().all()
