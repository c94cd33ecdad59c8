"""Writes quantised checkpoints of random models, and computes the logits of what they stand for."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from baton.model.attention.attention_inputs import CausalMasks
from baton.model.attention.paged_attention import paged_attention
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel
from baton.model.loading.model_source import DEMO_DIR
from baton.model.step.forward import Forward
from baton.model.step.step_inputs import PreparedSequence, pack
from tests.unit.model.loading.gguf_models import random_state

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of a module by the last part of their names, and the values that they stand for."""
Pack = Callable[[str, torch.Tensor], Stored]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QWEN3 = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
"""Sizes of a small Qwen3 with the demo's vocabulary."""


def write_checkpoint(
    path: Path,
    config: PreTrainedConfig,
    quantization: Mapping[str, Any],
    pack: Pack,
    *,
    names: tuple[str, ...] = LINEAR,
    state: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint whose layers of these names `pack` stores. Returns the weights that it means."""
    path.mkdir(exist_ok=True)
    tensors, means = {}, {}
    for name, value in (state or random_state(config)).items():
        module, _, last = name.rpartition(".")
        if last == "weight" and module.endswith(names):
            stored, means[name] = pack(module, value)
            tensors |= {f"{module}.{key}": each.contiguous() for key, each in stored.items()}
        else:
            tensors[name] = means[name] = value
    write_files(path, config, quantization, tensors)
    return means


def write_files(
    path: Path, config: PreTrainedConfig, quantization: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write the files of a checkpoint with the demo's tokenizer."""
    path.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    config.save_pretrained(path)
    content = json.loads((path / "config.json").read_text())
    content |= {"quantization_config": dict(quantization), "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(content))
    shutil.copyfile(DEMO_DIR / "tokenizer.json", path / "tokenizer.json")


def tokens(config: PreTrainedConfig, number: int = 20) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (1, number), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model's own code under SDPA; eager if it has none, as gpt-oss with its sinks."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    found: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits
    return found.float()


@torch.inference_mode()
def paged_logits(loaded: LoadedModel, token_ids: torch.Tensor, forward: Forward) -> torch.Tensor:
    """Return the logits [1, tokens, vocabulary] of a prompt [1, tokens] in two chunks, in blocks of 16."""
    length = token_ids.shape[1]
    blocks = np.roll(np.arange(-(-length // 16)), 1)
    cache = KvCache.zeros(loaded.layout(16), len(blocks), dtype=loaded.dtype)
    masks, found = CausalMasks(cache.dtype, cache.device), []
    for begin, end in ((0, 3 * length // 4), (3 * length // 4, length)):
        part = PreparedSequence(
            seq_id=1,
            token_ids=token_ids[0, begin:end].numpy(),
            position_begin=begin,
            kv_begin=begin,
            block_ids=blocks[: -(-end // 16)],
            sample=None,
        )
        step = pack([part], cache, masks, paged_attention)
        found.append(forward(replace(step, sample_rows=torch.arange(end - begin))).logits)
    return torch.cat(found)[None].float()


def reference_logits(config: PreTrainedConfig, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of transformers' own model with plain float32 weights."""
    model = AutoModelForCausalLM.from_config(config).float().eval()
    missing, unexpected = model.load_state_dict(dict(state), strict=False)
    assert set(missing) <= set(model.all_tied_weights_keys)
    assert not unexpected
    model.tie_weights()
    return logits(model, tokens(config))


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of logits, in units of their standard deviation."""
    return float((actual - expected).abs().max() / expected.std())
