"""The model of an emulated worker: KV of the real size, under another fingerprint."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ModelError
from baton.core.tokenizer_fingerprint import EMULATED
from baton.engine.executors.emulated_model import read_emulated_model
from baton.model.loading.model_source import DEMO_DIR

CONFIG = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}


def directory(path: Path, **changes: Any) -> Path:
    """Write a model directory without weights."""
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_emulated_layout_has_the_real_sizes_and_another_fingerprint(dtype: str) -> None:
    from baton.model.loading.model_loader import load_model

    real, emulated = load_model(DEMO_DIR, dtype=dtype, device="cpu"), read_emulated_model(DEMO_DIR, dtype=dtype)
    emulated_layout, real_layout = emulated.layout(16), real.layout(16)
    assert emulated_layout.groups == real_layout.groups
    assert emulated_layout.tokenizer_fingerprint == real_layout.tokenizer_fingerprint
    assert (emulated.vocab_size, emulated.max_model_len) == (real.vocab_size, real.max_model_len)
    assert emulated_layout.model_fingerprint.startswith(EMULATED)
    assert "model_fingerprint" in str(emulated_layout.mismatch(real_layout))


def test_missing_config_values_are_derived_and_weights_are_not_needed(tmp_path: Path) -> None:
    model = read_emulated_model(directory(tmp_path), max_model_len=300)
    assert (model.num_kv_heads, model.head_dim, model.dtype, model.max_model_len) == (4, 16, "float16", 300)
    assert model.layout(16).block_bytes == 3 * 2 * 4 * 16 * 16 * 2
    model = read_emulated_model(directory(tmp_path, num_key_value_heads=2, head_dim=32, torch_dtype="int8"))
    assert (model.num_kv_heads, model.head_dim, model.dtype, model.max_model_len) == (2, 32, "float32", 512)


def test_text_part_of_a_composite_model_is_read(tmp_path: Path) -> None:
    model = read_emulated_model(directory(tmp_path, text_config={"num_hidden_layers": 5, "sliding_window": 9}))
    assert (model.num_layers, model.head_dim, model.has_window) == (5, 16, True)
    assert read_emulated_model(directory(tmp_path, text_config=None)).num_layers == 3
    with pytest.raises(ModelError, match="text_config"):
        read_emulated_model(directory(tmp_path, text_config="other.json"))


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": None, "quantization_config": {"quant_method": "gptq"}}, "bfloat16"),
        ({"quantization_config": {"quant_method": "gptq"}}, "float16"),
        ({"text_config": {"dtype": "float32"}}, "float16"),
        ({"torch_dtype": None, "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_dtype_is_that_of_a_real_worker(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    assert read_emulated_model(directory(tmp_path, **changes)).dtype == dtype


def test_different_models_have_different_fingerprints(tmp_path: Path) -> None:
    names = {
        read_emulated_model(directory(tmp_path, **changes), dtype=dtype).model_fingerprint
        for changes in ({}, {"rope_theta": 5})
        for dtype in ("auto", "bfloat16")
    }
    assert len(names) == 4
    assert read_emulated_model(directory(tmp_path)).model_fingerprint in names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": None, "hidden_size": 0},
            "has no positive integer num_hidden_layers, hidden_size; --device emulated",
        ),
        ({"max_position_embeddings": 100}, "--max-model-len is 300; must be at most 100"),
    ],
)
def test_error_names_missing_or_wrong_values(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_emulated_model(directory(tmp_path, **changes), max_model_len=300)


@pytest.mark.parametrize(
    ("name", "message"), [("config.json", "no readable config.json"), ("tokenizer.json", "no readable tokenizer.json")]
)
def test_error_names_a_missing_file(tmp_path: Path, name: str, message: str) -> None:
    (directory(tmp_path) / name).unlink()
    with pytest.raises(ModelError, match=message):
        read_emulated_model(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (directory(tmp_path) / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_emulated_model(tmp_path)
