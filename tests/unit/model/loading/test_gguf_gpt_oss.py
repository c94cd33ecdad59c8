"""Loads GGUF files of gpt-oss: MXFP4 experts with biases, attention sinks, windows and YaRN."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig

from baton.model.loading.model_loader import load_model
from tests.unit.model.loading.gguf_models import random_state, write_gguf
from tests.unit.model.loading.quantised_models import distance, logits, reference_logits, tokens
from tests.unit.model.loading.test_gguf_models import convert, mixed, require_native_decoder, sizes

pytest.importorskip("gguf", reason="the gguf library is not installed")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 20_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}


def gpt_oss_config() -> GptOssConfig:
    more = {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return GptOssConfig(**sizes(rope_parameters=YARN), **more)


def values(writer: Any) -> None:
    """Add what the converter of gpt-oss writes; neither the kinds of layers nor YaRN's other parameters."""
    import gguf

    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(512)
    writer.add_sliding_window(8)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


def published(name: str) -> int:
    """Return the types of the published files: MXFP4 experts, Q8_0 elsewhere."""
    return 39 if "_exps" in name else 0 if "gate_inp" in name else 8


@pytest.mark.parametrize("pick", [published, mixed, lambda name: 1], ids=["published", "mixed", "float16"])
def test_logits_are_those_of_transformers(pick: Callable[[str], int], tmp_path: Path) -> None:
    """Plain experts become the block's own parameters, others linear layers of each expert."""
    config, path = gpt_oss_config(), tmp_path / "m.gguf"
    means = write_gguf(path, "gpt-oss", config, random_state(config), pick=pick, extra=values)
    loaded = load_model(convert(path), dtype="float32", device="cpu")
    assert loaded.config.layer_types == ["sliding_attention", "full_attention"]
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5


def test_native_decoder_runs_the_published_types(tmp_path: Path) -> None:
    config, path = gpt_oss_config(), tmp_path / "m.gguf"
    write_gguf(path, "gpt-oss", config, random_state(config), pick=published, extra=values)
    require_native_decoder(path, config)
