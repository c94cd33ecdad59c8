"""Tests that the memory required before loading is what a packed model takes, and that codes are freed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from baton.core.errors import ModelError
from baton.model.kernels.cpu.kernel_library import WeightArena, load_kernels
from baton.model.linear.linear import Linear
from baton.model.linear.packed_weight import ArenaMemory, PackedWeight, PlacedBytes, pack_weight
from baton.model.linear.packer import WeightPacker
from baton.model.linear.weights import CodedWeight
from baton.model.loading.checkpoint_weights import HELD_BITS, LoadOptions, open_by_module
from baton.model.loading.gguf.block_formats import BLOCK_FORMATS
from baton.model.loading.gguf.gguf_types import packed_bits_of, weight_of
from baton.model.loading.model_loader import load_model
from tests.model_families import TINY
from tests.unit.model.loading.quantised_models import write_checkpoint
from tests.unit.model.loading.test_compressed_tensors import QWEN3, compressed, scheme_config

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's packed weights and parameters."""
    packed = {
        id(weight): weight for module in model.modules() if (weight := getattr(module, "weight", None)) is not None
    }
    sizes = [weight.num_bytes for weight in packed.values() if isinstance(weight, PackedWeight)]
    return sum(sizes) + sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def estimate_and_load(
    path: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig, weights: str = "auto"
) -> tuple[int, PreTrainedModel]:
    packer = WeightPacker(load_kernels(1), dtype=torch.bfloat16, native_is_faster=True)
    options = LoadOptions(dtype=torch.bfloat16, device=torch.device("cpu"), weights=weights, packer=packer)
    with open_by_module(path, model_class, config, options) as pending:
        return pending.num_bytes(), pending.load()[0]


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(
    "config",
    [
        lambda: Qwen3Config(**TINY, head_dim=16),
        lambda: Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True),
        lambda: Qwen3MoeConfig(**TINY, **EXPERTS),
    ],
    ids=["dense", "tied", "moe"],
)
def test_required_memory_covers_the_quantised_model(
    config: Callable[[], PreTrainedConfig], weights: str, save: Callable[[PreTrainedConfig], Path]
) -> None:
    path = save(config())
    plain: Any = load_model(path, device="cpu").model
    required, model = estimate_and_load(path, type(plain), plain.config, weights)
    block = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in plain.modules())
    unpacked = HELD_BITS * block // 8
    assert held_bytes(model) + unpacked <= required <= 1.2 * held_bytes(model) + unpacked
    assert not [each for each in model.modules() if isinstance(getattr(each, "weight", None), CodedWeight)]
    assert all(module.is_packed for module in model.modules() if isinstance(module, Linear))


@pytest.mark.parametrize("name", ["int4 groups asymmetric", "int8 channel"])
def test_required_memory_covers_a_quantised_checkpoint(name: str, tmp_path: Path) -> None:
    config = Qwen3Config(**QWEN3)
    write_checkpoint(tmp_path, config, scheme_config(name), lambda module, value: compressed(name, value))
    plain: Any = load_model(tmp_path, dtype="bfloat16", device="cpu").model
    required, model = estimate_and_load(tmp_path, type(plain), AutoConfig.from_pretrained(tmp_path))
    largest = max(module.weight.shape[0] * module.weight.shape[1] for module in model.modules() if _is_linear(module))
    assert held_bytes(model) <= required <= 1.3 * held_bytes(model) + HELD_BITS * largest // 8


def test_missing_memory_is_refused_by_name(save: Callable[[PreTrainedConfig], Path]) -> None:
    class NoMemory:
        def place(self, num_bytes: int, fill: object) -> PlacedBytes:
            raise OSError(12, "Cannot allocate memory")

    path = save(Qwen3Config(**TINY, head_dim=16))
    plain: Any = load_model(path, device="cpu").model
    packer = WeightPacker(load_kernels(1), dtype=torch.bfloat16, native_is_faster=True, memory=NoMemory())
    options = LoadOptions(dtype=torch.bfloat16, device=torch.device("cpu"), weights="int8", packer=packer)
    with (
        open_by_module(path, type(plain), plain.config, options) as pending,
        pytest.raises(ModelError, match=r"cannot be loaded as Qwen3ForCausalLM.*Cannot allocate memory"),
    ):
        pending.load()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, Linear | nn.Linear)


@pytest.mark.parametrize("type_id", list(BLOCK_FORMATS))
def test_bits_of_gguf_types_are_those_in_memory(type_id: int) -> None:
    block = BLOCK_FORMATS[type_id]
    raw = torch.zeros(64 * 512 // block.num_values * block.num_bytes, dtype=torch.uint8)
    weight = weight_of(raw, type_id, 64, 512)
    packed = pack_weight(load_kernels(1), weight, ArenaMemory(WeightArena(1024)), torch.float32)
    assert packed.num_bytes * 8 == packed_bits_of(type_id) * 64 * 512
