"""Loads each published format as a worker does, and compares logits with those of the dequantised weights.

docs/design/weights.md states the limits.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from baton.model.attention.paged_attention import PAGED
from baton.model.backends.backend_selection import choose_backend
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.linear.pack_model import rounds_activations
from baton.model.linear.packer import WeightPacker
from baton.model.loading.model_loader import LoadedModel, load_model
from tests.scale import sized
from tests.unit.model.loading.gguf_models import random_state
from tests.unit.model.loading.quantised_models import (
    QWEN3,
    Stored,
    logits,
    paged_logits,
    reference_logits,
    tokens,
    write_checkpoint,
    write_files,
)
from tests.unit.model.loading.test_published_layouts import CONFIGS, gptq

CODED_LIMIT, FLOAT_LIMIT = 0.02, 1e-5
"""Standard deviation of the error of logits, relative to theirs, where activations are rounded to 8 bits, and
where they are not, in float32."""


def published() -> Mapping[str, tuple[dict[str, Any], Callable[[torch.Tensor], Stored]]]:
    try:
        from tests.unit.model.loading.test_compressed_tensors import SCHEMES, compressed, scheme_config
    except pytest.skip.Exception:
        return CONFIGS
    schemes = {
        f"compressed-tensors {name}": (scheme_config(name), lambda value, name=name: compressed(name, value))
        for name in SCHEMES
    }
    return CONFIGS | schemes


FORMATS = published()


def load(path: Path) -> LoadedModel:
    def packer(dtype: torch.dtype) -> WeightPacker:
        return WeightPacker(load_kernels(1), dtype=dtype, native_is_faster=False)

    return load_model(path, dtype="float32", device="cpu", packer_for=packer)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).std() / right.std())


MULTIPLIED = (
    "gptq",
    "gptq v2 of 8 bits",
    "awq",
    "fp8 of blocks",
    "compressed-tensors int4 groups asymmetric",
    "compressed-tensors int8 packed groups",
    "compressed-tensors int8 channel",
    "compressed-tensors mxfp4",
)
"""Formats of `make test`: they differ in what kernels read. Tests of tests/unit/model/loading read all."""


@pytest.mark.parametrize("name", sized([name for name in MULTIPLIED if name in FORMATS], list(FORMATS)))
def test_native_products_of_a_published_format(name: str, tmp_path: Path) -> None:
    quantization, pack = FORMATS[name]
    config = Qwen3Config(**QWEN3)
    means = write_checkpoint(tmp_path, config, quantization, lambda module, value: pack(value))
    loaded = load(tmp_path)
    is_coded = "fp8" not in name
    assert rounds_activations(loaded.model) == is_coded
    assert ("round activations to 8 bits" in loaded.weight_format) == is_coded
    found = error(logits(loaded.model, tokens(config)), reference_logits(config, means))
    assert (1e-4 < found < CODED_LIMIT) if is_coded else found < FLOAT_LIMIT


DECODED = ("gptq desc_act", "awq", "fp8 of blocks")


@pytest.mark.parametrize("name", sized(DECODED, tuple(FORMATS)))
def test_native_decoder_runs_a_published_format(name: str, tmp_path: Path) -> None:
    """The choice of the backend includes verification."""
    quantization, pack = FORMATS[name]
    config = Qwen3Config(**QWEN3)
    means = write_checkpoint(tmp_path, config, quantization, lambda module, value: pack(value))
    assert decoder_error(load(tmp_path), reference_logits(config, means)) < (
        FLOAT_LIMIT if "fp8" in name else CODED_LIMIT
    )


def decoder_error(loaded: LoadedModel, right: torch.Tensor) -> float:
    loaded.model.set_attn_implementation(PAGED)
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=16)
    assert backend.name == "native decoder"
    return error(paged_logits(loaded, tokens(loaded.config), backend.forward), right)


def test_experts_in_the_order_of_activations(tmp_path: Path) -> None:
    """Each projection of each expert has an order of its own."""
    config = Qwen3MoeConfig(**QWEN3, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=96)
    state, stored = random_state(config), {}
    for name, value in list(state.items()):
        block, _, last = name.rpartition(".")
        if not block.endswith("mlp.experts"):
            stored[name] = value
            continue
        kinds = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        experts = []
        for number, expert in enumerate(value):
            means = []
            for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                tensors, meant = gptq(part, seed=len(stored))
                stored |= {f"{block}.{number}.{kind}.{key}": each for key, each in tensors.items()}
                means.append(meant)
            experts.append(torch.cat(means))
        state[name] = torch.stack(experts)
    write_files(tmp_path, config, {"quant_method": "gptq", "bits": 4, "desc_act": True}, stored)
    right = reference_logits(config, state)
    assert error(logits(load_model(tmp_path, dtype="float32", device="cpu").model, tokens(config)), right) < FLOAT_LIMIT
    loaded = load(tmp_path)
    assert error(logits(loaded.model, tokens(config)), right) < CODED_LIMIT
    assert decoder_error(loaded, right) < CODED_LIMIT
