"""Creates the models of benchmarks: random weights for a configuration, once for each directory."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from baton.model.loading.random_init import init_model
from bench.support.saved_figures import emptied


def created_model(config: PreTrainedConfig, directory: Path) -> Path:
    """Write random weights in bfloat16 to `directory`, unless it exists. Returns `directory`."""
    if not directory.exists():
        config.dtype = torch.bfloat16
        unfinished = emptied(directory.with_name(f"{directory.name}.new"))  # a stopped run leaves no part of a model
        init_model(config, unfinished)
        unfinished.rename(directory)
    return directory
