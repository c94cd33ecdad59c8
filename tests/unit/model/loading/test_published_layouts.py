"""Compares GPTQ, AWQ, FP8 and MXFP4 checkpoints, written by their specifications, with their meaning."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, Qwen3Config, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.core.errors import ModelError
from baton.model.attention.paged_attention import PAGED
from baton.model.backends.backend_selection import choose_backend
from baton.model.linear.weights import CodedWeight, FloatWeight
from baton.model.loading.model_loader import load_model
from baton.model.loading.model_support import causal_lm_class
from baton.model.loading.quantised.awq import AwqLayout
from baton.model.loading.quantised.gptq import GptqLayout
from baton.model.loading.quantised.layouts import layout_of
from baton.model.loading.quantised.module_tensors import CheckpointLayout, Tensors
from baton.model.loading.quantised.mxfp4 import mxfp4_weight
from baton.model.loading.quantised.scaled_floats import Fp8Layout
from tests.unit.model.loading.gguf_models import random_state
from tests.unit.model.loading.quantised_models import (
    QWEN3,
    Stored,
    distance,
    logits,
    reference_logits,
    tokens,
    write_checkpoint,
    write_files,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output whose code is in nibble i of a word, as AutoAWQ packs it."""


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack integers along the last axis into int32 words, lowest bits first."""
    per_word = 32 // bits
    parts = codes.astype(np.uint64).reshape(len(codes), -1, per_word)
    packed = np.zeros(parts.shape[:2], np.uint64)
    for nibble in range(per_word):
        packed |= parts[:, :, order[nibble] if order else nibble] << np.uint64(bits * nibble)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def rounded(value: torch.Tensor, bits: int, group_of: np.ndarray, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Return codes [n, k], scales and zero points [n, groups], with the group of each column given."""
    number = int(group_of.max()) + 1
    columns = value.numpy()
    codes = np.zeros(columns.shape, np.int64)
    scales, zeros = np.zeros((len(columns), number), np.float16), np.zeros((len(columns), number), np.int64)
    for group in range(number):
        part = columns[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        top = (1 << bits) - 1
        if symmetric:
            scales[:, group] = 2 * np.maximum(-low, high) / top
            zeros[:, group] = 1 << (bits - 1)
        else:
            scales[:, group] = (high - low) / top
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group].astype(np.float32)), 1, top)
        scaled = np.rint(part / scales[:, group : group + 1].astype(np.float32)) + zeros[:, group : group + 1]
        codes[:, group_of == group] = np.clip(scaled, 0, top)
    return codes, scales, zeros


def meant(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> torch.Tensor:
    values = (codes - zeros[:, group_of]) * scales[:, group_of].astype(np.float64)
    return torch.from_numpy(values).float()


def gptq(
    value: torch.Tensor, bits: int = 4, group: int = 32, *, form: str = "gptq", symmetric: bool = False, seed: int = -1
) -> Stored:
    """Store a weight as AutoGPTQ does. seed: of an order of activations (desc_act); -1 for none."""
    group_of = np.arange(value.shape[1]) // group
    if seed >= 0:
        group_of = np.random.default_rng(seed).permutation(group_of)
    codes, scales, zeros = rounded(value, bits, group_of, symmetric)
    stored = {
        "qweight": words(codes, bits).T,
        "qzeros": words(zeros.T - (1 if form == "gptq" else 0), bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return stored, meant(codes, scales, zeros, group_of)


def without_g_idx(stored: dict[str, torch.Tensor], means: torch.Tensor) -> Stored:
    return {name: tensor for name, tensor in stored.items() if name != "g_idx"}, means


def awq(value: torch.Tensor, group: int = 64) -> Stored:
    group_of = np.arange(value.shape[1]) // group
    codes, scales, zeros = rounded(value, 4, group_of, symmetric=False)
    stored = {
        "qweight": words(codes.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return stored, meant(codes, scales, zeros, group_of)


def fp8(value: torch.Tensor, block: tuple[int, int] = (128, 128)) -> Stored:
    """Store a weight as DeepSeek-V3 does: values divided by their block's scale, and that scale."""
    height, width = block
    rows, columns = value.shape
    inverse = torch.zeros(-(-rows // height), -(-columns // width))
    values, means = torch.zeros(value.shape, dtype=torch.float8_e4m3fn), torch.zeros(value.shape)
    for i, j in np.ndindex(*inverse.shape):
        at = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        inverse[i, j] = value[at].abs().max() / 448
        values[at] = (value[at] / inverse[i, j]).to(torch.float8_e4m3fn)
        means[at] = values[at].float() * inverse[i, j]
    return {"weight": values, "weight_scale_inv": inverse}, means


def fp8_rows(value: torch.Tensor, *, is_tensor: bool = False) -> Stored:
    """Store a weight as FBGEMM does, with a scale for each row; or as ModelOpt, with one for all."""
    size = value.abs().max() if is_tensor else value.abs().amax(1, keepdim=True)
    scale = size / 448
    values = (value / scale).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale": scale}
    return stored | ({"input_scale": torch.tensor(0.5)} if is_tensor else {}), values.float() * scale


CONFIGS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Stored]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, gptq),
    "gptq v2 of 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "checkpoint_format": "gptq_v2"},
        lambda value: gptq(value, 8, 64, form="gptq_v2"),
    ),
    "gptq v2 named otherwise": (
        {"quant_method": "gptq", "bits": 4, "format": "GPTQ_V2", "dynamic": {"-:lm_head": {}, ".*up": {"bits": 4}}},
        lambda value: gptq(value, form="gptq_v2"),
    ),
    "gptq symmetric": ({"quant_method": "gptq", "bits": 4, "sym": True}, lambda value: gptq(value, symmetric=True)),
    "gptq desc_act": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        lambda value: gptq(value, seed=value.shape[0]),
    ),
    "gptq one group": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        lambda value: gptq(value, group=value.shape[1]),
    ),
    "gptq with a short last group": (
        {"quant_method": "gptq", "bits": 4, "group_size": 96, "desc_act": True},
        lambda value: gptq(value, group=96, seed=value.shape[0]),
    ),
    "gptq with a short last group, without g_idx": (
        {"quant_method": "gptq", "bits": 4, "group_size": 96},
        lambda value: without_g_idx(*gptq(value, group=96)),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, awq),
    "fp8 of blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    "fp8 of odd blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 80]},
        lambda value: fp8(value, (48, 80)),
    ),
    "fbgemm fp8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        lambda value: fp8_rows(value, is_tensor=True),
    ),
    "auto-round as gptq": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "backend": "auto"},
        lambda value: without_g_idx(*gptq(value, symmetric=True)),
    ),
    "auto-round as awq": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 64, "backend": "auto_round:awq"},
        awq,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_model_has_the_logits_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    quantization, pack = CONFIGS[name]
    config = Qwen3Config(**QWEN3, tie_word_embeddings=True)
    means = write_checkpoint(tmp_path, config, quantization, lambda module, value: pack(value))
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_is_exact(name: str) -> None:
    quantization, pack = CONFIGS[name]
    stored, means = pack(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 0.1)
    weight = layout_of(quantization).weight("m", stored)
    assert torch.allclose(weight.dequantized(), means, rtol=1e-6, atol=1e-7)
    assert isinstance(weight, FloatWeight if "fp8" in name else CodedWeight)
    if isinstance(weight, CodedWeight):
        assert (weight.input_order is not None) == ("desc_act" in quantization)
        assert (weight.offsets is None) == (name in ("gptq symmetric", "auto-round as gptq"))


def test_modules_of_gptq_may_have_bits_of_their_own(tmp_path: Path) -> None:
    """`dynamic` sets them by name; the tensors of a module say them, too."""
    config = Qwen3Config(**QWEN3)
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {r"+:.*\.down_proj": {"bits": 8}}}
    means = write_checkpoint(
        tmp_path, config, quantization, lambda module, value: gptq(value, 8 if module.endswith("down_proj") else 4)
    )
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_0_are_those_of_version_2(bits: int) -> None:
    """GPTQModel writes version 1 as words of version 2 less a word of ones, so 0 borrows from the next."""
    stored, _ = gptq(torch.randn(64, 256), bits, form="gptq_v2")
    zeros = np.random.default_rng(bits).integers(0, 3, (8, 64)) * ((1 << bits) // 2 - 1)
    stored["qzeros"] = words(zeros, bits)
    ones = np.uint32(0x11111111 if bits == 4 else 0x01010101)
    less_ones = torch.from_numpy((stored["qzeros"].numpy().view(np.uint32) - ones).view(np.int32))
    found, right = (
        GptqLayout({"bits": bits, "checkpoint_format": form}).weight("m", stored | {"qzeros": packed})
        for form, packed in (("gptq", less_ones), ("gptq_v2", stored["qzeros"]))
    )
    assert torch.equal(found.dequantized(), right.dequantized())  # type: ignore[union-attr]
    factors = stored["scales"].float().T
    expected = -factors * torch.from_numpy(zeros.T.copy()).float()
    assert torch.equal(right.offsets.supers, expected)  # type: ignore[union-attr]


def test_scales_of_tensors_and_rows_of_fp8() -> None:
    values = torch.randn(32, 48).to(torch.float8_e4m3fn)
    for scale, spread in (
        (torch.tensor(0.5), torch.tensor(0.5)),
        (torch.rand(32), None),
        (torch.rand(32, 1), None),
    ):
        weight = Fp8Layout({}).weight("m", {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)})
        expected = values.float() * (spread if spread is not None else scale.view(32, 1))
        assert torch.equal(weight.dequantized(), expected)  # type: ignore[union-attr]


def test_mxfp4_is_what_transformers_unpacks() -> None:
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (2, 32, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 135, (2, 32, 4), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    for expert in range(2):
        assert torch.equal(mxfp4_weight("m", blocks[expert], scales[expert]).dequantized(), expected[expert])


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """The attention of gpt-oss has sinks, which the model's own code computes here."""
    config = GptOssConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    state = random_state(config)
    stored, generator = {}, torch.Generator().manual_seed(6)
    for name, value in list(state.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = value.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.full((experts, outputs, inputs // 32), 123, dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        else:
            stored[name] = value
    write_files(tmp_path, config, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, stored)
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    assert loaded.weight_format.startswith("mxfp4")
    reference = causal_lm_class(config)(config).float().eval()
    reference.load_state_dict(state)
    for model in (loaded.model, reference):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        actual, expected = (m(input_ids=tokens(config), use_cache=False).logits for m in (loaded.model, reference))
    assert distance(actual, expected) < 1e-5
    loaded.model.set_attn_implementation(PAGED)
    backend = choose_backend(loaded, kernels="auto", num_threads=1, block_size_tokens=16)
    assert backend.name == "native decoder"


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("scale", ["scale_inv", "scale"])
def test_experts_in_one_fp8_tensor(is_transposed: bool, scale: str, tmp_path: Path) -> None:
    """The tensors of all experts are together: outputs by inputs, or transposed as those of Qwen3-VL-MoE."""
    config = Qwen3MoeConfig(**QWEN3, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=96)
    block = (32, 64)
    state, stored = random_state(config), {}
    for name, value in list(state.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = value
            continue
        parts = [fp8(matrix, block) for matrix in value]
        state[name] = torch.stack([means for _, means in parts])
        for key, suffix in (("weight", ""), ("weight_scale_inv", f"_{scale}")):
            tensor = torch.stack([each[key] for each, _ in parts])
            stored[name + suffix] = tensor.transpose(1, 2) if is_transposed else tensor
    write_files(tmp_path, config, {"quant_method": "fp8", "weight_block_size": list(block)}, stored)
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, state)) < 1e-5
    stored = {name: value for name, value in stored.items() if not name.endswith(f"1.mlp.experts.down_proj_{scale}")}
    write_files(tmp_path, config, {"quant_method": "fp8", "weight_block_size": list(block)}, stored)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.down_proj has no FP8 values and scales for 3"):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_tensors_of_an_unforeseen_form_are_refused(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**QWEN3, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=96)
    stored = random_state(config)
    for name in [name for name in stored if ".mlp.experts." in name]:
        stored[name] = torch.ones(3).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.ones(3)
    write_files(tmp_path, config, {"quant_method": "fp8"}, stored)
    with pytest.raises(ModelError, match="is damaged, or not in the form that its configuration says"):
        load_model(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({}, "unnamed"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*\.down_proj": {"bits": 3}}}, "dynamic has bits 3"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:gptqmodel"}, "auto_round:gptqmodel"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "llm_compressor"}, "llm_compressor"),
        ({"quant_method": "auto-round", "bits": 2}, "bits 2"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 4, "format": "llm-awq"}, "llm-awq"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    ],
)
def test_unknown_methods_are_refused_by_name(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        layout_of(config)


def changed(tensors: Tensors, **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: value for name, value in (dict(tensors) | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("layout", "pack", "changes", "problem"),
    [
        (GptqLayout({"bits": 4}), gptq, {"scales": torch.ones(3, 64), "g_idx": None}, "scales of the shape"),
        (GptqLayout({"bits": 4}), gptq, {"qzeros": torch.zeros(1, 8, dtype=torch.int32)}, "zero points of the shape"),
        (GptqLayout({"bits": 4}), gptq, {"qzeros": None}, "no tensor qzeros"),
        (
            GptqLayout({"bits": 4}),
            gptq,
            {"qzeros": torch.zeros(8, 6, dtype=torch.int32)},
            "3 bits each; must be 4 or 8",
        ),
        (GptqLayout({"bits": 4}), gptq, {"qweight": torch.ones(4, 4)}, "int32 matrix"),
        (GptqLayout({"bits": 4, "desc_act": True}), gptq, {"g_idx": torch.zeros(256, dtype=torch.int32)}, "g_idx"),
        (GptqLayout({"bits": 4}), gptq, {"g_idx": torch.full((256,), -7, dtype=torch.int32)}, "g_idx"),
        (GptqLayout({"bits": 4}), gptq, {"g_idx": torch.full((256,), 2**31 - 1, dtype=torch.int32)}, "g_idx"),
        (GptqLayout({"bits": 4}), gptq, {"g_idx": torch.ones(2, 128, dtype=torch.int32)}, "g_idx"),
        (AwqLayout({"bits": 4}), awq, {"scales": torch.ones(4, 3)}, "scales of the shape"),
        (AwqLayout({"bits": 4}), awq, {"qweight": torch.ones(4, 4)}, "int32 matrix"),
        (Fp8Layout({"weight_block_size": [128, 128]}), fp8, {"weight_scale_inv": torch.ones(7, 7)}, "does not fit"),
        (Fp8Layout({"weight_block_size": [128, 128]}), fp8, {"weight": torch.ones(64, 256)}, "float8_e4m3fn"),
        (Fp8Layout({}), fp8, {"weight_scale_inv": None}, "no tensor weight_scale_inv"),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    layout: CheckpointLayout,
    pack: Callable[[torch.Tensor], Stored],
    changes: dict[str, torch.Tensor | None],
    problem: str,
) -> None:
    stored, _ = pack(torch.randn(64, 256))
    with pytest.raises(ModelError, match=problem):
        layout.weight("model.layers.0.mlp.up_proj", changed(stored, **changes))


def test_mxfp4_blocks_without_scales_for_all_are_refused() -> None:
    with pytest.raises(ModelError, match="16 of blocks for each scale"):
        mxfp4_weight("m", torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8))


def test_incomplete_and_misshapen_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    quantization, pack = CONFIGS["awq"]
    config = Qwen3Config(**QWEN3)
    write_checkpoint(tmp_path / "a", config, quantization, lambda module, value: pack(value[:, :64]))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj has a weight of 128 x 64"):
        load_model(tmp_path / "a", device="cpu")
    state = random_state(config)
    del state["model.layers.1.mlp.up_proj.weight"], state["model.norm.weight"]
    write_checkpoint(tmp_path / "b", config, quantization, lambda module, value: pack(value), state=state)
    with pytest.raises(ModelError, match=r"lacks 2 weights of Qwen3ForCausalLM.*layers\.1\.mlp\.up_proj"):
        load_model(tmp_path / "b", device="cpu")


def test_quantisation_and_setting_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    config = Qwen3Config(**QWEN3)
    found = set()
    for name in ("gptq", "awq"):
        quantization, pack = CONFIGS[name]
        write_checkpoint(tmp_path / name, config, quantization, lambda module, value, pack=pack: pack(value))
        found.add(load_model(tmp_path / name, device="cpu").model_fingerprint)
    write_checkpoint(tmp_path / "plain", config, {}, lambda module, value: ({}, value), names=())
    import json

    content = json.loads((tmp_path / "plain" / "config.json").read_text())
    del content["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(content))
    for weights in ("auto", "int8", "int4"):
        found.add(load_model(tmp_path / "plain", device="cpu", weights=weights).model_fingerprint)
    assert len(found) == 5
