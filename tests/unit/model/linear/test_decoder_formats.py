"""Runs the native decoder with projections of different formats in one layer, and chooses it for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Starcoder2Config

from baton.model.backends.backend_selection import choose_backend
from baton.model.backends.native_layers import DecoderForward
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.linear.linear import Linear
from baton.model.linear.quantise import quantise
from baton.model.loading.model_loader import load_model
from tests.model_families import ENDS, TINY
from tests.unit.model.test_decoder_backends import answers, form_of

FORMATS = {
    "self_attn.q_proj": (4, 16, False),
    "self_attn.k_proj": (4, 16, False),
    "self_attn.v_proj": (6, 16, True),
    "self_attn.o_proj": (8, 32, False),
    "mlp.gate_proj": (5, 32, True),
    "mlp.down_proj": (4, 32, True),
}
"""Bits, group size and offsets of each projection. The up projection stays in bfloat16."""


def test_native_decoder_takes_a_format_per_projection(save: Callable[[PreTrainedConfig], Path]) -> None:
    """The same weights in bfloat16 give the same logits, up to the rounding of activations to 8 bits."""
    path = save(LlamaConfig(**TINY, attention_bias=True))
    loaded, kernels = load_model(path, dtype="bfloat16", device="cpu"), load_kernels(1)
    base: Any = loaded.model.base_model
    coded: list[tuple[nn.Module, str, Linear]] = []
    for layer in base.layers:
        for name, (bits, group_size, has_offsets) in FORMATS.items():
            module = layer.get_submodule(name)
            weight = quantise(module.weight.data, bits, group_size, has_offsets=has_offsets)
            module.weight.data = weight.dequantized().bfloat16()
            parent, _, child = name.partition(".")
            coded.append((getattr(layer, parent), child, Linear(weight, module.bias)))
    right = answers(loaded, DecoderForward(form_of(loaded), kernels), 140)
    for owner, child, replacement in coded:
        setattr(owner, child, replacement)
    found = answers(loaded, DecoderForward(form_of(loaded), kernels), 140)
    assert 0 < (found - right).std() < 0.05 * right.std()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (lambda: Gemma3TextConfig(**TINY, **ENDS, head_dim=32), "native decoder"),
        (lambda: Starcoder2Config(**TINY), "native products"),
    ],
    ids=["known form", "unknown form"],
)
def test_coded_weights_run_on_the_native_gemm(
    config: Callable[[], PreTrainedConfig], expected: str, save: Callable[[PreTrainedConfig], Path]
) -> None:
    loaded = load_model(save(config()), dtype="bfloat16", device="cpu")
    for name, module in list(loaded.model.named_modules()):
        if isinstance(module, nn.Linear):
            coded = quantise(module.weight.data, 8, 32, has_offsets=False)
            loaded.model.set_submodule(name, Linear(coded, module.bias))
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=16)
    assert backend.name == expected
    backend.forward.close()
