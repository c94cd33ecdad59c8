"""Tests where a checkpoint says how it is quantised, and that quantised weights without a description are
refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3MoeConfig

from baton.core.errors import ModelError
from baton.model.loading.model_loader import load_model
from tests.unit.model.loading.gguf_models import random_state
from tests.unit.model.loading.quantised_models import (
    QWEN3,
    distance,
    logits,
    reference_logits,
    tokens,
    write_checkpoint,
    write_files,
)
from tests.unit.model.loading.test_published_layouts import CONFIGS, fp8_rows


def change_config(path: Path, **changes: Any) -> None:
    content = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def write_fp8(path: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of FP8 whose config.json says nothing of it. Returns the weights that it means."""
    config = Qwen3Config(**QWEN3)
    means = write_checkpoint(path, config, {}, lambda module, value: fp8_rows(value, is_tensor=True))
    change_config(path, quantization_config=None)
    return means


def has_right_logits(path: Path, means: dict[str, torch.Tensor]) -> bool:
    config, loaded = Qwen3Config(**QWEN3), load_model(path, dtype="float32", device="cpu")
    return distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5


def test_a_file_of_modelopt_describes_the_weights(tmp_path: Path) -> None:
    means = write_fp8(tmp_path)
    described = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    assert has_right_logits(tmp_path, means)


@pytest.mark.parametrize("text", ["{", "[]", '{"quantization": 1}', "[" * 100_000])
def test_a_damaged_file_of_modelopt_is_refused(text: str, tmp_path: Path) -> None:
    write_fp8(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"hf_quant_config\.json.*download or copy it again"):
        load_model(tmp_path, device="cpu")


def test_compression_config_is_a_quantization_config(tmp_path: Path) -> None:
    means = write_fp8(tmp_path)
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = {"targets": ["Linear"], "weights": weights}
    change_config(tmp_path, compression_config={"format": "float-quantized", "config_groups": {"group_0": group}})
    assert has_right_logits(tmp_path, means)


@pytest.mark.parametrize("setting", ["auto", "int8"])
def test_quantised_weights_without_a_description_are_refused(setting: str, tmp_path: Path) -> None:
    write_fp8(tmp_path)
    problem = r"nothing says how to read them.*Download all its JSON files"
    with pytest.raises(ModelError, match=problem):
        load_model(tmp_path, device="cpu", weights=setting)
    tensors = load_file(tmp_path / "model.safetensors")
    for dtype in (torch.int8, torch.uint8, torch.float8_e5m2):  # without scales, which are another mark
        changed = {name: value for name, value in tensors.items() if "scale" not in name}
        changed |= {name: value.float().to(dtype) for name, value in changed.items() if "up_proj" in name}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=problem):
            load_model(tmp_path, device="cpu", weights=setting)
    write_checkpoint(tmp_path, Qwen3Config(**QWEN3), {}, lambda module, value: CONFIGS["gptq"][1](value))
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(ModelError, match=f"q(weight|zeros) of type I32.*{problem}"):
        load_model(tmp_path, device="cpu", weights=setting)


def test_codes_without_known_scales_are_refused(tmp_path: Path) -> None:
    """Experts in one tensor, with scales under a name that no reader knows."""
    config = Qwen3MoeConfig(**QWEN3, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=96)
    stored = random_state(config)
    for name in [name for name in stored if ".mlp.experts." in name]:
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        stored[f"{name}_weight_scale"] = torch.ones(3)
    write_files(tmp_path, config, {"quant_method": "fp8"}, stored)
    with pytest.raises(
        ModelError, match=r"experts\.gate_up_proj is float8_e4m3fn in the checkpoint, and has no scales"
    ):
        load_model(tmp_path, device="cpu")


def test_norms_of_integers_are_refused(tmp_path: Path) -> None:
    config = Qwen3Config(**QWEN3)
    stored = random_state(config)
    stored["model.norm.weight"] = torch.ones(128, dtype=torch.int8)
    write_files(tmp_path, config, {"quant_method": "fp8"}, stored)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is int8"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_scales_of_kv_do_not_make_a_checkpoint_quantised(weights: str, tmp_path: Path) -> None:
    config = Qwen3Config(**QWEN3)
    means = write_checkpoint(
        tmp_path, config, {}, lambda module, value: ({"weight": value, "k_scale": torch.ones(1)}, value)
    )
    change_config(tmp_path, quantization_config=None)
    loaded = load_model(tmp_path, dtype="float32", device="cpu", weights=weights)
    limit = 1e-5 if weights == "auto" else 0.2
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < limit


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantised_checkpoint_is_not_quantised_again(weights: str, name: str, tmp_path: Path) -> None:
    quantization, pack = CONFIGS[name]
    write_checkpoint(tmp_path, Qwen3Config(**QWEN3), quantization, lambda module, value: pack(value))
    with pytest.raises(ModelError, match=f"--weights {weights} is for plain checkpoints.*weights.*use --weights auto"):
        load_model(tmp_path, device="cpu", weights=weights)
