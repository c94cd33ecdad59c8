"""An exported GGUF file stands for the same model as the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_directory import write_gguf_directory
from baton.model.loading.model_loader import load_model
from bench.support.engine.engine_formats import file_weights, needs_of
from bench.support.engine.gguf_export import export_gguf
from tests.model_families import ENDS, save_random

pytest.importorskip("gguf")

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 6}, **ENDS, head_dim=32, sliding_window=16, query_pre_attn_scalar=32
    ),
}


@pytest.fixture
def gguf_model(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Return the checkpoint and the exported file."""
    config = CONFIGS[request.param]
    config.dtype = torch.bfloat16
    checkpoint = save_random(config, tmp_path / "checkpoint")
    return checkpoint, export_gguf(checkpoint, tmp_path / "gguf" / "m.gguf")


@pytest.mark.parametrize("gguf_model", list(CONFIGS), indirect=True)
def test_baton_reads_the_weights_of_the_checkpoint_from_the_file(gguf_model: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, file = gguf_model
    directory = tmp_path / "read"
    directory.mkdir()
    write_gguf_directory(file, directory)
    loaded = load_model(directory, dtype="float32", device="cpu")
    plain: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = loaded.model.state_dict()
    for name, values in plain.state_dict().items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0, msg=name)
    for name in ("rope_parameters", "head_dim", "vocab_size", "tie_word_embeddings", "layer_types"):
        assert getattr(loaded.config, name, None) == getattr(plain.config, name, None), name
    assert loaded.config.rms_norm_eps == pytest.approx(plain.config.rms_norm_eps, rel=1e-6)


@pytest.mark.parametrize("gguf_model", ["llama"], indirect=True)
def test_bytes_of_a_step_leave_out_an_embedding_that_is_not_the_head(gguf_model: tuple[Path, Path]) -> None:
    checkpoint, file = gguf_model
    num_params, read_bytes = file_weights(file)
    embedding = 256 * 64
    assert num_params == sum(tensor.numel() for tensor in AutoModelForCausalLM.from_pretrained(checkpoint).parameters())
    norms = (2 * 2 + 1) * 64
    assert read_bytes == 2 * (num_params - embedding) + 2 * norms  # norms take 32 bits
    needs = needs_of(checkpoint, "q4_k_m", file)
    assert needs.weight_bits == pytest.approx(8 * read_bytes / (num_params - embedding))
    assert needs_of(checkpoint, "int8", None).weight_bits == 8.25


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="of type gpt2; must be one of gemma3_text, llama"):
        export_gguf(tmp_path, tmp_path / "m.gguf")


def test_scaled_rotary_embeddings_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    LlamaConfig(**SIZES, rope_parameters=rope).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"scales its rotary embedding \(linear\)"):
        export_gguf(tmp_path, tmp_path / "m.gguf")
