"""Tests that the text part of composite checkpoints is served alone, with transformers' own logits."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.muse_spark import MuseSparkConfig, MuseSparkForConditionalGeneration

from baton.core.errors import ModelError
from baton.engine.executors.emulated_model import read_emulated_model
from baton.model.backends.fused_layers import FusedForward
from baton.model.forms.describe import describe_decoder
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.linear.pack_model import holds_weight
from baton.model.loading.model_loader import load_model
from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.text_part import own_name
from baton.model.step.forward import ModelForward
from baton.model.verification.verify_backend import verify_logits, verify_masks
from tests.model_families import TINY
from tests.unit.model.loading.quantised_models import Stored, paged_logits
from tests.unit.model.loading.test_published_layouts import awq, fp8, gptq

SIZE = 16
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**TINY, "head_dim": 16, "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


def gemma3() -> PreTrainedConfig:
    return Gemma3Config(
        text_config={**TEXT, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**VISION, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )


def mistral3(*, tied: bool = False) -> PreTrainedConfig:
    return Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "tie_word_embeddings": tied},
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14},
        tie_word_embeddings=tied,
    )


def qwen2_vl() -> PreTrainedConfig:
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
    return Qwen2VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision)


def qwen3_vl() -> PreTrainedConfig:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    return Qwen3VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision)


COMPOSITES: dict[str, tuple[Callable[[], PreTrainedConfig], type[PreTrainedModel], str]] = {
    "gemma 3": (gemma3, Gemma3ForConditionalGeneration, "Gemma3ForCausalLM"),
    "mistral small 3": (mistral3, Mistral3ForConditionalGeneration, "MistralForCausalLM"),
    "mistral, tied": (lambda: mistral3(tied=True), Mistral3ForConditionalGeneration, "MistralForCausalLM"),
    "qwen2-vl": (qwen2_vl, Qwen2VLForConditionalGeneration, "Qwen2VLTextForCausalLM"),
    "qwen3-vl": (qwen3_vl, Qwen3VLForConditionalGeneration, "Qwen3VLTextForCausalLM"),
}


def save_composite(name: str, path: Path) -> PreTrainedModel:
    """Write a composite checkpoint with random weights, as its own class saves it, and return the model."""
    config, model_class, _ = COMPOSITES[name]
    return save_random_composite(model_class, config(), path)


def save_random_composite(model_class: type[PreTrainedModel], config: PreTrainedConfig, path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model: Any = model_class(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.15) if parameter.dim() > 1 else parameter.data.normal_(1.0, 0.2)
    model.tie_weights()
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_bytes((DEMO_DIR / file).read_bytes())
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", list(COMPOSITES))
def test_text_part_equals_the_composite_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    whole: Any = save_composite(name, path)
    loaded = load_model(path, device="cpu")
    assert type(loaded.model).__name__ == COMPOSITES[name][2]
    token_ids = torch.from_numpy(np.random.default_rng(0).integers(3, 200, (1, 50)))
    with torch.inference_mode():
        right = whole(input_ids=token_ids, use_cache=False).logits
    own = ModelForward(loaded.model)
    assert (paged_logits(loaded, token_ids, own) - right).abs().max() < 2e-4
    own.close()
    fused = FusedForward(describe_decoder(loaded, verify_masks(loaded, SIZE)), load_kernels(1))
    assert (paged_logits(loaded, token_ids, fused) - right).abs().max() < 2e-4
    verify_logits(loaded, SIZE, forward=fused)
    embedding, head = loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings()
    assert (embedding.weight is head.weight) is ("gemma" in name or "tied" in name)  # type: ignore[union-attr]
    assert read_emulated_model(path).vocab_size == loaded.vocab_size == 256


def save_muse_spark(path: Path) -> PreTrainedModel:
    """Write a tiny Muse Spark with random weights, and return it."""
    experts = {"moe_hidden_size": 32, "moe_intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    audio = {"num_hidden_layers": 4, "hidden_sizes": [8] * 4, "depths": [1] * 4, "out_hidden_size": 64}
    config = MuseSparkConfig(
        text_config={**TEXT, **experts, "sliding_window": 24},
        vision_config=VISION,
        audio_config=VISION | audio,
        out_hidden_size=64,
        projector_hidden_size=16,
    )
    return save_random_composite(MuseSparkForConditionalGeneration, config, path)


def test_logits_have_the_factor_and_the_soft_cap_of_the_composite_model(tmp_path: Path) -> None:
    whole: Any = save_muse_spark(tmp_path / "model")
    loaded = load_model(tmp_path / "model", device="cpu")
    assert loaded.config.output_multiplier != 1.0
    assert loaded.config.final_logit_softcapping is not None
    token_ids = torch.from_numpy(np.random.default_rng(0).integers(3, 200, (1, 50)))
    with torch.inference_mode():
        right = whole(input_ids=token_ids, use_cache=False).logits
    with closing(ModelForward(loaded.model)) as own:
        assert (paged_logits(loaded, token_ids, own) - right).abs().max() < 2e-4


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUANTISED: dict[str, tuple[str, Mapping[str, Any], Callable[[torch.Tensor], Stored], bool]] = {
    "gemma 3 in compressed-tensors": (
        "gemma 3",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["re:.*vision_tower.*", "re:.*multi_modal_projector.*"],
            "config_groups": {
                "group_0": {
                    "targets": ["re:.*language_model.*_proj"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 32]},
                }
            },
        },
        lambda value: compressed_fp8(value, (48, 32)),
        False,
    ),
    "mistral small 3 in gptq, head too": (
        "mistral small 3",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        lambda value: gptq(value),
        True,
    ),
    "qwen2-vl in awq": (
        "qwen2-vl",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "modules_to_not_convert": ["visual"]},
        lambda value: awq(value, 32),
        False,
    ),
    "qwen3-vl in fp8": (
        "qwen3-vl",
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        lambda value: fp8(value, (32, 32)),
        False,
    ),
}
"""Composite, quantization_config, how a weight is stored, and if the output layer is quantised, too."""


def compressed_fp8(value: torch.Tensor, block: tuple[int, int]) -> Stored:
    stored, means = fp8(value, block)
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"]}, means


def quantise_files(path: Path, model: PreTrainedModel, name: str) -> None:
    """Store the projections of the text part in another format. `model` then has what they stand for."""
    _, quantization, pack, has_head = QUANTISED[name]
    parameters = {own_name(key): parameter for key, parameter in model.named_parameters() if own_name(key)}
    stored = {}
    for key, value in load_file(path / "model.safetensors").items():
        own, module = own_name(key), key.removesuffix(".weight")
        if own is not None and module.endswith((*PROJECTIONS, *(("lm_head",) if has_head else ()))):
            tensors, parameters[own].data = pack(value)
            stored |= {f"{module}.{last}": tensor.contiguous() for last, tensor in tensors.items()}
        else:
            stored[key] = value
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((path / "config.json").read_text()) | {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", list(QUANTISED))
def test_quantised_text_part_equals_the_composite_model(name: str, tmp_path: Path) -> None:
    """The quantization_config is that of the whole, and names modules as the whole does."""
    path = tmp_path / "model"
    whole: Any = save_composite(QUANTISED[name][0], path)
    quantise_files(path, whole, name)
    loaded = load_model(path, dtype="float32", device="cpu")
    assert loaded.weight_format != "plain"
    layers: Any = loaded.model.base_model.layers
    assert all(holds_weight(layer.get_submodule(f"self_attn.{each}")) for layer in layers for each in PROJECTIONS[:4])
    token_ids = torch.from_numpy(np.random.default_rng(0).integers(3, 200, (1, 50)))
    with torch.inference_mode():
        right = whole(input_ids=token_ids, use_cache=False).logits
    with closing(ModelForward(loaded.model)) as own:
        assert (paged_logits(loaded, token_ids, own) - right).abs().max() < 2e-4
    assert holds_weight(loaded.model.lm_head) == QUANTISED[name][3]


def test_plain_text_part_is_quantised_at_load(tmp_path: Path) -> None:
    path = tmp_path / "model"
    whole: Any = save_composite("gemma 3", path)
    loaded = load_model(path, dtype="float32", device="cpu", weights="int8")
    assert loaded.weight_format == "plain, then int8"
    token_ids = torch.from_numpy(np.random.default_rng(0).integers(3, 200, (1, 50)))
    with torch.inference_mode():
        right = whole(input_ids=token_ids, use_cache=False).logits
    with closing(ModelForward(loaded.model)) as own:
        assert 1e-4 < float((paged_logits(loaded, token_ids, own) - right).std() / right.std()) < 0.05


def test_unknown_quantisation_of_a_composite_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_composite("gemma 3", path)
    content = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}}
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"unsupported method.*bitsandbytes"):
        load_model(path, device="cpu")


def test_weights_of_other_parts_are_not_counted(tmp_path: Path) -> None:
    """With memory for the text part and little more, it is loaded."""
    path = tmp_path / "model"
    save_composite("mistral small 3", path)
    sizes = {name: tensor.numel() for name, tensor in load_file(path / "model.safetensors").items()}
    text = 4 * sum(size for name, size in sizes.items() if own_name(name))
    assert 0 < text < 4 * sum(sizes.values())
    load_model(path, device="cpu", free_bytes=lambda _device: text)
    with pytest.raises(ModelError, match="are free on cpu"):
        load_model(path, device="cpu", free_bytes=lambda _device: text - 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.vision_tower.layers.0.norm.weight", None),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
    ],
)
def test_names_of_the_text_part(name: str, expected: str | None) -> None:
    assert own_name(name) == expected


def test_incomplete_text_part_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_composite("gemma 3", path)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if own_name(name) == "model.layers.1.mlp.up_proj.weight")
    del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        load_model(path, device="cpu")


def test_end_tokens_of_the_text_part(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_composite("gemma 3", path)
    for file in ("generation_config.json",):
        (path / file).unlink(missing_ok=True)
    config = json.loads((path / "config.json").read_text())
    config.pop("eos_token_id", None)
    (path / "config.json").write_text(json.dumps(config))
    assert load_model(path, device="cpu").eos_token_ids == (2,)
