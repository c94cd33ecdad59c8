"""Loads a GGUF file with the rotary embedding of Phi-4-mini, up to where its frequencies change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Phi3Config

from baton.core.errors import ModelError
from baton.model.loading.model_loader import load_model
from tests.unit.model.loading.gguf_models import random_state, write_gguf
from tests.unit.model.loading.quantised_models import distance, logits, reference_logits, tokens
from tests.unit.model.loading.test_gguf_models import convert, sizes

pytest.importorskip("gguf", reason="the gguf library is not installed")

SHORT_LEN = 128
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 20_000.0,
    "short_factor": [1.0 + 0.25 * number for number in range(24)],
    "long_factor": [4.0 + number for number in range(24)],
    "original_max_position_embeddings": SHORT_LEN,
    "partial_rotary_factor": 0.75,
}


def longrope(writer: Any) -> None:
    writer.add_rope_dimension_count(48)
    writer.add_rope_scaling_orig_ctx_len(SHORT_LEN)
    for name in ("short", "long"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(ROPE[f"{name}_factor"], np.float32))


def test_logits_of_short_contexts_are_those_of_transformers(tmp_path: Path) -> None:
    config = Phi3Config(**sizes(rope_parameters=ROPE), original_max_position_embeddings=SHORT_LEN)
    path = tmp_path / "m.gguf"
    means = write_gguf(path, "phi3", config, random_state(config), extra=longrope)
    directory = convert(path)
    loaded = load_model(directory, dtype="float32", device="cpu", max_model_len=SHORT_LEN)
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5
    with pytest.raises(ModelError, match=f"give --max-model-len {SHORT_LEN} or less"):
        load_model(directory, dtype="float32", device="cpu")
