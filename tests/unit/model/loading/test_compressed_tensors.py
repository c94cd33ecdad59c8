"""Compares checkpoints that the compressed-tensors library writes with what it decompresses itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from baton.core.errors import ModelError
from baton.model.linear.weights import CodedWeight, FloatWeight
from baton.model.loading import model_loader
from baton.model.loading.model_loader import load_model
from baton.model.loading.quantised.compressed_tensors import CompressedTensorsLayout
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

compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 groups asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "int4 channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int4 channel asymmetric": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    "int4 tensor asymmetric": ("pack-quantized", {"num_bits": 4, "strategy": "tensor", "symmetric": False}),
    "int8 packed groups": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 128}),
    "int8 packed asymmetric": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8 channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 channel asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8 tensor": ("naive-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}


def scheme_config(name: str, **more: Any) -> dict[str, Any]:
    form, weights = SCHEMES[name]
    weights = {"type": "int", "symmetric": True} | {
        key: value for key, value in weights.items() if key != "scale_dtype"
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **more,
    }


def compressed(name: str, value: torch.Tensor) -> Stored:
    """Return a weight as the library compresses it, and as it decompresses it."""
    form, weights = SCHEMES[name]
    args = quantization.QuantizationArgs(**({"symmetric": True} | weights))
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    low, high = extremes(value, args)
    scale, zero = quantization.utils.calculate_qparams(low, high, args)
    state = {"weight": value, "weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"].float()


def extremes(value: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = value.shape
    if args.strategy == "block":
        height, width = args.block_structure
        blocks = value.view(rows // height, height, columns // width, width)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    if args.strategy == "tensor":
        return value.min().view(1), value.max().view(1)
    parts = value.view(rows, -1, args.group_size or columns)
    return parts.amin(2), parts.amax(2)


@pytest.mark.parametrize("name", SCHEMES)
def test_weight_is_what_the_library_decompresses(name: str) -> None:
    value = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) + 0.3
    stored, means = compressed(name, value)
    weight = CompressedTensorsLayout(scheme_config(name)).weight("model.layers.0.mlp.up_proj", stored)
    assert torch.allclose(weight.dequantized(), means, rtol=2**-7 if "mxfp4" in name else 1e-5, atol=1e-6)
    assert isinstance(weight, FloatWeight if "fp8" in name else CodedWeight)
    assert 0.001 < distance(means, value) < 2


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("target", ["re:.*up_proj", "model.layers.0.mlp.up_proj"])
def test_the_most_specific_target_decides(target: str, is_first: bool) -> None:
    """As in the library: a name comes before an expression, which comes before a class, in whatever order."""
    stored, means = compressed("int8 packed groups", torch.randn(64, 128, generator=torch.Generator().manual_seed(1)))
    names = ("int4 groups", "int8 packed groups")
    groups = [scheme_config(name)["config_groups"]["group_0"] for name in names]
    groups[1]["targets"] = [target]
    groups = groups[::-1] if is_first else groups
    config = scheme_config("int4 groups", config_groups=dict(zip("ab", groups, strict=True)))
    weight = CompressedTensorsLayout(config).weight("model.layers.0.mlp.up_proj", stored)
    assert torch.allclose(weight.dequantized(), means, rtol=1e-5, atol=1e-6)


def test_a_block_structure_may_be_a_text() -> None:
    """As older versions of the library wrote it."""
    stored, means = compressed("fp8 block", torch.randn(64, 128))
    config = scheme_config("fp8 block")
    for text, problem in (("32x64", None), ("32x", "block_structure '32x'"), ([32], r"block_structure \[32\]")):
        config["config_groups"]["group_0"]["weights"]["block_structure"] = text
        if problem is None:
            weight = CompressedTensorsLayout(config).weight("m", stored)
            assert torch.allclose(weight.dequantized(), means)  # type: ignore[union-attr]
            continue
        with pytest.raises(ModelError, match=problem):
            CompressedTensorsLayout(config)


@pytest.mark.parametrize("name", ["int4 groups asymmetric", "int8 channel", "fp8 block"])
def test_model_has_the_logits_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    config = Qwen3Config(**QWEN3)
    means = write_checkpoint(tmp_path, config, scheme_config(name), lambda module, value: compressed(name, value))
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    assert "compressed-tensors" in loaded.weight_format
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5


EXPERTS = {"num_experts_per_tok": 2}
BLOCKS: dict[str, tuple[Callable[[], PreTrainedConfig], dict[str, str]]] = {
    "qwen3": (
        lambda: Qwen3MoeConfig(**QWEN3, **EXPERTS, num_experts=3, moe_intermediate_size=256, norm_topk_prob=True),
        {},
    ),
    "mixtral": (
        lambda: MixtralConfig(**QWEN3, **EXPERTS, num_local_experts=3),
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", ".mlp.": ".block_sparse_moe."},
    ),
}
"""Models with experts, and what the parts of a name are called in their checkpoints."""


@pytest.mark.parametrize("name", BLOCKS)
def test_weights_of_experts_stay_apart(name: str, tmp_path: Path) -> None:
    make_config, names = BLOCKS[name]
    config = make_config()
    state, tensors = random_state(config), {}
    for key, value in list(state.items()):
        own = key
        for part, other in names.items():
            own = own.replace(part, other) if "mlp" in key or part in key else own
        if "experts" not in key:
            tensors[own] = value
            continue
        block, meant = own.rpartition(".")[0], []
        for number, expert in enumerate(value):
            parts = expert.chunk(2) if key.endswith("gate_up_proj") else [expert]
            kinds = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
            packed = [compressed("int4 groups", part) for part in parts]
            meant.append(torch.cat([values for _, values in packed]))
            for kind, (stored, _) in zip(kinds, packed, strict=True):
                module = f"{block}.{number}.{names.get(kind, kind)}"
                tensors |= {f"{module}.{last}": each for last, each in stored.items()}
        state[key] = torch.stack(meant)
    write_files(tmp_path, config, scheme_config("int4 groups"), tensors)
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, state)) < 1e-5


def test_columns_in_the_order_of_activations() -> None:
    """Groups of scattered columns become groups side by side, and the weight has the order of its inputs."""
    value = torch.randn(32, 128, generator=torch.Generator().manual_seed(2))
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    stored, means = compressed("int4 groups", value)
    g_idx = torch.empty(128, dtype=torch.int32)
    g_idx[order] = torch.arange(128, dtype=torch.int32) // 32
    # the library stores codes in the order of inputs: column order[i] has the i-th code
    codes = compressors.unpack_from_int32(stored["weight_packed"], 4, value.shape)
    scattered, expected = torch.empty_like(codes), torch.empty_like(means)
    scattered[:, order], expected[:, order] = codes, means
    tensors = stored | {"weight_packed": compressors.pack_to_int32(scattered, 4), "weight_g_idx": g_idx}
    weight = CompressedTensorsLayout(scheme_config("int4 groups")).weight("m", tensors)
    assert isinstance(weight, CodedWeight)
    assert weight.input_order is not None
    assert torch.allclose(weight.dequantized(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "marlin-24"}, "marlin-24"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
        ({"sparsity_config": ["dense"]}, "sparsity"),
        ({"config_groups": {}}, "no group"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": None}}}, "no group"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": 8}}}, "weights 8"),
        ({"config_groups": [1]}, "groups by name"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 3, "type": "int"}}}}, "3 bits"),
        ({"config_groups": {"g": {"targets": ["re:("], "weights": {"num_bits": 4, "type": "int"}}}}, "expression"),
        ({"config_groups": {"g": {"targets": ["Conv"], "weights": {"num_bits": 4, "type": "int"}}}}, "no group"),
        ({"ignore": ["re:.*up_proj"]}, "ignores it"),
    ],
)
def test_unknown_configurations_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    stored, _ = compressed("int4 groups", torch.randn(64, 128))
    with pytest.raises(ModelError, match=problem):
        CompressedTensorsLayout(scheme_config("int4 groups", **changes)).weight("model.up_proj", stored)


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("int4 groups", {"weight_scale": torch.ones(64, 5)}, "scales of the shape"),
        ("int4 groups", {"weight_shape": torch.tensor([64, 4096])}, "weight_shape"),
        ("int4 groups", {"weight_shape": torch.tensor(64)}, "int32 matrix"),
        ("int4 groups", {"weight_packed": torch.ones(64, 16)}, "int32 matrix"),
        ("int4 groups", {"weight_packed": torch.ones(64, 32, dtype=torch.int32)}, "32 words in a row"),
        ("int4 groups asymmetric", {"weight_zero_point": torch.ones(8, 2)}, "weight_zero_point is float32"),
        ("int4 groups", {"weight_packed": None, "weight": torch.ones(64, 128, dtype=torch.int16)}, "int8 matrix"),
        ("int4 groups", {"weight_scale": None}, "no tensor weight_scale"),
        ("int4 groups asymmetric", {"weight_zero_point": None}, "no tensor weight_zero_point"),
        ("int8 channel", {"weight_scale": torch.ones(3, 1)}, "scales of the shape"),
        ("fp8 block", {"weight_scale": torch.ones(3, 7)}, "does not fit"),
    ],
)
def test_damaged_tensors_are_refused_by_name(name: str, damage: dict[str, Any], problem: str) -> None:
    stored, _ = compressed(name, torch.randn(64, 128))
    tensors = {key: value for key, value in (stored | damage).items() if value is not None}
    with pytest.raises(ModelError, match=problem):
        CompressedTensorsLayout(scheme_config(name)).weight("model.up_proj", tensors)


@pytest.mark.parametrize("groups", [{}, {"kv": {"targets": ["re:.*self_attn$"], "weights": None}}])
def test_weights_without_a_group_are_plain(groups: dict[str, Any], tmp_path: Path) -> None:
    """As in a checkpoint that has scales for KV only."""
    config = Qwen3Config(**QWEN3)
    quantised = scheme_config("fp8 tensor", config_groups=groups, kv_cache_scheme={"num_bits": 8, "type": "float"})

    def pack(module: str, value: torch.Tensor) -> Stored:
        return {"weight": value} | {name: torch.ones(1) for name in ("k_scale", "v_scale")}, value

    means = write_checkpoint(tmp_path, config, quantised, pack)
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    assert loaded.weight_format == "compressed-tensors plain weights"
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5
    assert load_model(tmp_path, device="cpu", weights="int8").weight_format.endswith("then int8")


DENSE_GROUPS = scheme_config("int8 channel asymmetric", format="dense")
ACTIVATIONS = scheme_config("int8 channel", config_groups={"a": {"targets": ["Linear"], "weights": None}})


@pytest.mark.parametrize(
    ("quantised", "scales"),
    [
        (DENSE_GROUPS, {"weight_scale": torch.ones(1), "weight_zero_point": torch.zeros(1, dtype=torch.int8)}),
        (ACTIVATIONS, {"input_scale": torch.ones(1), "input_zero_point": torch.zeros(1, dtype=torch.int8)}),
    ],
    ids=["dense", "activations"],
)
def test_scales_of_plain_weights_do_not_make_a_checkpoint_quantised(
    quantised: dict[str, Any], scales: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it may be quantised, and the check of memory counts the model's dtype."""
    config = Qwen3Config(**QWEN3)

    def pack(module: str, value: torch.Tensor) -> Stored:
        return {"weight": value} | {name: scale.clone() for name, scale in scales.items()}, value

    means = write_checkpoint(tmp_path, config, quantised, pack)
    loaded = load_model(tmp_path, dtype="float32", device="cpu", weights="int8")
    assert loaded.weight_format == "compressed-tensors plain weights, then int8"
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 0.2
    needed: list[int] = []
    monkeypatch.setattr(model_loader, "require_free_memory", lambda size, *others: needed.append(size))
    load_model(tmp_path, dtype="float32", device="cpu")
    assert needed == [4 * sum(value.numel() for value in means.values())]


def test_weights_of_the_dense_format_are_plain() -> None:
    """Their scales are those with which they would be quantised."""
    value = torch.randn(64, 128).bfloat16()
    layout = CompressedTensorsLayout(scheme_config("int4 groups", format="dense"))
    weight = layout.weight("m", {"weight": value, "weight_scale": torch.ones(64, 4)})
    assert torch.equal(weight.dequantized(), value.float())  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"m\.weight is int8; in the format dense"):
        layout.weight("m", {"weight": value.to(torch.int8), "weight_scale": torch.ones(64, 4)})
