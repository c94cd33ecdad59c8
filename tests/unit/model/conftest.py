"""Tiny models with random weights, made once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3Config

from baton.model.loading.random_init import init_model

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[PreTrainedConfig], Path]:
    """Random weights of a configuration in a directory of its own."""

    def write(config: PreTrainedConfig) -> Path:
        path = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        init_model(config, path, seed=1)
        return path

    return write


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers in float32. Not to be written to."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    init_model(Qwen3Config(**TINY, head_dim=16), path, seed=1)
    return path
