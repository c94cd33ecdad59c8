"""Provides tiny models with random weights."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3Config

from baton.model.loading.random_init import init_model
from tests.model_families import TINY


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[PreTrainedConfig], Path]:
    """Return a function that writes random weights of a configuration to a new directory."""

    def write(config: PreTrainedConfig) -> Path:
        path = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        init_model(config, path, seed=1)
        return path

    return write


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a two-layer Qwen3 in float32, once per run; tests must not write to it."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    init_model(Qwen3Config(**TINY, head_dim=16), path, seed=1)
    return path
