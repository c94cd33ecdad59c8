"""Tests which models are loaded, which are refused, and that the error names the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2VLConfig,
    Qwen3Config,
    T5Config,
)

from baton.core.eos_token_ids import eos_token_ids
from baton.core.errors import ModelError
from baton.core.tokenizer_fingerprint import tokenizer_fingerprint
from baton.model.linear.linear import Linear
from baton.model.loading import weight_digests
from baton.model.loading.model_loader import load_model
from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.model_support import causal_lm_class
from baton.model.loading.random_init import init_model
from tests.model_families import TINY

LONG = {
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 1024,
    "rope_theta": 1e4,
}
SHORT = {"pad_token_id": 0, "original_max_position_embeddings": 1024}


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of a model directory that the test may modify."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "copy"))


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_loaded_model_has_its_fingerprints_and_limits(tiny_dir: Path) -> None:
    loaded = load_model(tiny_dir, device="cpu", max_model_len=100)
    layout = loaded.layout(16)
    assert (loaded.max_model_len, loaded.vocab_size, loaded.dtype) == (100, 256, torch.float32)
    assert loaded.eos_token_ids == eos_token_ids(DEMO_DIR) != ()
    assert (layout.num_layers, layout.block_bytes) == (2, 2 * 2 * 2 * 16 * 16 * 4)
    assert layout.tokenizer_fingerprint == tokenizer_fingerprint(tiny_dir)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_the_demo_model_is_served() -> None:
    loaded = load_model(DEMO_DIR, device="cpu")
    assert loaded.dtype == torch.bfloat16
    assert loaded.max_model_len == 16_384


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_load_dtype(tiny_dir: Path, dtype: str) -> None:
    loaded = load_model(tiny_dir, dtype=dtype, device="cpu")
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.layout(16).groups[0].components[0].dtype == dtype


@pytest.mark.parametrize("config_class", [Gemma3TextConfig, Glm4Config])
def test_a_model_that_overflows_in_float16_is_loaded_in_bfloat16(
    config_class: type[PreTrainedConfig], tmp_path: Path
) -> None:
    config = config_class(**{"pad_token_id": None, **TINY}, head_dim=16, dtype=torch.float16)
    init_model(config, tmp_path / "model")
    assert load_model(tmp_path / "model", device="cpu").dtype == torch.bfloat16
    with pytest.raises(ModelError, match="exceeds the range of float16; use --dtype bfloat16"):
        load_model(tmp_path / "model", dtype="float16", device="cpu")


def test_max_model_len_above_the_models_own_is_refused(tiny_dir: Path) -> None:
    with pytest.raises(ModelError, match="4097 is more than the model's own 4096"):
        load_model(tiny_dir, device="cpu", max_model_len=4097)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (T5Config(), "encoder-decoder"),
        (Qwen2VLConfig(), "composite model with a text part; give the configuration of that part"),
        (MambaConfig(num_hidden_layers=2), "recurrent state"),
        (Gemma2Config(), "soft cap"),
        (Llama4TextConfig(), "chunked"),
        (LlamaConfig(**TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
        (
            Phi3Config(**TINY, **SHORT, rope_parameters={"rope_type": "longrope", **LONG}),
            "longrope.*beyond 1024 positions; give --max-model-len 1024 or less",
        ),
        (Qwen3Config(**TINY, layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (LlamaConfig(**TINY, quantization_config={"quant_method": "gptq", "bits": 2}), "GPTQ with bits 2"),
        (LlamaConfig(**TINY, quantization_config={"quant_method": "aqlm"}), "quantization_config: aqlm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_configurations_are_refused(config: PreTrainedConfig, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        causal_lm_class(config)


def test_longrope_is_served_up_to_the_length_where_it_changes() -> None:
    config = Phi3Config(**TINY, **SHORT, rope_parameters={"rope_type": "longrope", **LONG})
    assert causal_lm_class(config, max_model_len=1024).__name__ == "Phi3ForCausalLM"
    with pytest.raises(ModelError, match="beyond 1024 positions"):
        causal_lm_class(config, max_model_len=1025)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ],
)
def test_supported_rope_types_are_accepted(rope: dict[str, object]) -> None:
    assert (
        causal_lm_class(LlamaConfig(**TINY, rope_parameters={"rope_theta": 1e4, **rope})).__name__ == "LlamaForCausalLM"
    )


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_deeply_nested_json_is_refused(copy: Path, name: str) -> None:
    if name == "model.safetensors.index.json":
        (copy / "model.safetensors").unlink()
    (copy / name).write_text('{"weight_map":' + "[" * 100_000)
    with pytest.raises(ModelError, match=name):
        load_model(copy, device="cpu")


@pytest.mark.parametrize("changes", [{"num_attention_heads": "many"}, {"layer_types": 3}, {"rope_parameters": [1]}])
def test_values_that_the_configuration_class_refuses_are_model_errors(copy: Path, changes: dict[str, object]) -> None:
    edit(copy / "config.json", **changes)
    with pytest.raises(ModelError, match=r"config\.json describes a model that this version of transformers"):
        load_model(copy, device="cpu")


def test_deeply_nested_header_of_weights_is_refused(copy: Path) -> None:
    header = b'{"a":' + b"[" * 100_000
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_model(copy, device="cpu")


def test_unknown_quantisation_is_refused_by_name(copy: Path) -> None:
    edit(copy / "config.json", quantization_config={"quant_method": "aqlm", "bits": 4})
    with pytest.raises(ModelError, match="quantization_config: aqlm"):
        load_model(copy, device="cpu")


@pytest.mark.parametrize(("weights", "error"), [("int8", 0.03), ("int4", 0.4)])
def test_weights_are_quantised_when_the_model_is_loaded(tiny_dir: Path, weights: str, error: float) -> None:
    """The output layer is quantised, the embedding and the norms are not."""
    plain, coded = load_model(tiny_dir, device="cpu"), load_model(tiny_dir, device="cpu", weights=weights)
    assert coded.weight_format == f"plain, then {weights}"
    assert all(isinstance(layer.mlp.up_proj, Linear) for layer in coded.model.base_model.layers)
    assert isinstance(coded.model.lm_head, Linear)
    assert type(coded.model.base_model.embed_tokens) is torch.nn.Embedding
    token_ids = torch.arange(20)[None]
    for loaded in (plain, coded):
        loaded.model.set_attn_implementation("sdpa")
    expected, found = (loaded.model(input_ids=token_ids, use_cache=False).logits for loaded in (plain, coded))
    assert 0 < float((found - expected).std() / expected.std()) < error


def test_weights_that_do_not_fit_are_refused_before_loading(tiny_dir: Path) -> None:
    """Of a quantised model all weights are counted as they are held: at most ten bits each."""
    sizes = [parameter.numel() for parameter in load_model(tiny_dir, device="cpu").model.parameters()]
    plain, coded = 4 * sum(sizes), 4 * 256 * 64 + 10 * sum(sizes) // 8
    assert coded < plain
    load_model(tiny_dir, device="cpu", weights="int4", free_bytes=lambda device: coded)
    for weights, free in (("auto", coded), ("int4", coded // 2)):
        with pytest.raises(ModelError, match="take"):
            load_model(tiny_dir, device="cpu", weights=weights, free_bytes=lambda device, free=free: free)


def test_missing_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no readable tokenizer\.json"):
        load_model(copy, device="cpu")


def test_missing_weights_are_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickles"):
        load_model(copy, device="cpu")


def test_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    init_model(Qwen3Config(**TINY), tmp_path / "many", shard_bytes=40_000)
    missing = sorted((tmp_path / "many").glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ModelError, match=missing.name):
        load_model(tmp_path / "many", device="cpu")


def test_incomplete_checkpoint_is_refused(copy: Path) -> None:
    """transformers would initialise missing weights randomly."""
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        load_model(copy, device="cpu")


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    edit(copy / "config.json", intermediate_size=128)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(copy, device="cpu")


def test_truncated_file_is_refused(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="copy it again"):
        load_model(copy, device="cpu")


@pytest.mark.parametrize(
    "header", [[], 7, {"a": 1}, {"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}], ids=str
)
def test_damaged_header_is_refused(header: object, copy: Path) -> None:
    text = json.dumps(header).encode()
    (copy / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ModelError, match=r"copy it again|cannot be loaded as Qwen3ForCausalLM"):
        load_model(copy, device="cpu")


@pytest.mark.parametrize(
    "index", [[], {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": [1]}}], ids=str
)
def test_damaged_index_is_refused(index: object, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="copy it again"):
        load_model(copy, device="cpu")


@pytest.mark.parametrize("changes", [{"model_type": "no-such-model"}, {"model_type": None, "architectures": None}])
def test_unknown_architecture_is_refused(copy: Path, changes: dict[str, object]) -> None:
    edit(copy / "config.json", **changes)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(copy, device="cpu")


def test_code_of_the_checkpoint_is_not_run(copy: Path) -> None:
    (copy / "evil.py").write_text(f"open({str(copy / 'canary')!r}, 'w')\nclass Evil: pass\n")
    edit(
        copy / "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
    )
    with pytest.raises(ModelError):
        load_model(copy, device="cpu")
    assert not (copy / "canary").exists()


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path, device="cpu")


def test_cuda_without_a_gpu_is_refused(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="--device cpu"):
        load_model(tiny_dir, device="cuda")


def fingerprint(path: Path, **arguments: object) -> str:
    return load_model(path, device="cpu", **arguments).model_fingerprint  # type: ignore[arg-type]


def test_fingerprint_depends_on_content_only(
    tiny_dir: Path, copy: Path, save: Callable[[PreTrainedConfig], Path]
) -> None:
    same = fingerprint(tiny_dir)
    edit(copy / "config.json", transformers_version="5.0.0", architectures=["Renamed"], use_cache=False)
    assert fingerprint(copy) == same
    assert fingerprint(copy, dtype="bfloat16") != same
    edit(copy / "config.json", rms_norm_eps=1e-5)
    assert fingerprint(copy) != same
    assert fingerprint(save(Qwen3Config(**TINY, head_dim=16))) == same


def test_fingerprint_differs_for_other_weights(tiny_dir: Path, tmp_path: Path) -> None:
    """Compare another seed, and a change of one value in one norm."""
    init_model(Qwen3Config(**TINY, head_dim=16), tmp_path / "other", seed=2)
    tensors = load_file(tiny_dir / "model.safetensors")
    shutil.copytree(tiny_dir, tmp_path / "tuned")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})
    assert len({fingerprint(tiny_dir), fingerprint(tmp_path / "other"), fingerprint(tmp_path / "tuned")}) == 3


def test_a_start_says_that_it_hashes_the_weights(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_digests, "NOTABLE_BYTES", 1)
    said: list[str] = []
    load_model(copy, device="cpu", say=said.append)
    assert "hashes the weights" in said[0]


def test_tokenizer_fingerprint_depends_on_content_only(copy: Path, tiny_dir: Path) -> None:
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(tiny_dir)
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    assert tokenizer_fingerprint(copy) != tokenizer_fingerprint(tiny_dir)


def test_random_init_refuses_unsupported_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="soft cap"):
        init_model(Gemma2Config(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_whose_configuration_does_not_show_the_problem_are_left_to_verification() -> None:
    """Verification refuses them, because it sees the arguments of attention."""
    bert = BertConfig(is_decoder=True, **{k: v for k, v in TINY.items() if k != "num_key_value_heads"})
    assert causal_lm_class(bert).__name__ == "BertLMHeadModel"
    assert causal_lm_class(GptOssConfig(**TINY)).__name__ == "GptOssForCausalLM"
