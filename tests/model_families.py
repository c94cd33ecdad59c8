"""Tiny configurations of the model families that Baton serves, each through its own configuration class.

`save_random` writes one with random weights. Norms, biases and sinks are random, too, so that a norm in the
wrong place or a missing bias changes the logits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DbrxConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteSWAConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

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
ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MIXED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.25 * i for i in range(12)],
    "long_factor": [4.0 + i for i in range(12)],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A family. `max_model_len`: the longest context that can be served; None: the model's own."""

    config: Callable[[], PreTrainedConfig]
    max_model_len: int | None = None


FAMILIES: Mapping[str, Family] = {
    "llama 3": Family(lambda: LlamaConfig(**TINY, rope_parameters=_LLAMA3, attention_bias=True)),
    "mistral": Family(lambda: MistralConfig(**TINY, sliding_window=40)),
    "qwen2": Family(lambda: Qwen2Config(**TINY, use_sliding_window=True, sliding_window=24, max_window_layers=1)),
    "qwen3": Family(lambda: Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=True)),
    "qwen3-moe": Family(
        lambda: Qwen3MoeConfig(
            **TINY,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        )
    ),
    "qwen3-moe, not normalised": Family(
        lambda: Qwen3MoeConfig(
            **TINY, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=False
        )
    ),
    "mixtral": Family(lambda: MixtralConfig(**TINY, num_local_experts=4)),
    "gemma 3": Family(lambda: Gemma3TextConfig(**TINY, **ENDS, **_MIXED, head_dim=32, final_logit_softcapping=20.0)),
    "phi 3": Family(lambda: Phi3Config(**TINY, **ENDS, sliding_window=24)),
    "phi 4 mini": Family(
        lambda: Phi3Config(
            **TINY | {"hidden_size": 128},
            **ENDS,
            rope_parameters=dict(_LONGROPE),
            original_max_position_embeddings=128,
        ),
        max_model_len=128,
    ),
    "olmo 2": Family(lambda: Olmo2Config(**TINY)),
    "olmo 3": Family(lambda: Olmo3Config(**TINY, **_MIXED, rope_parameters={"rope_theta": 1e4, **_YARN})),
    "granite": Family(
        lambda: GraniteConfig(
            **TINY, logits_scaling=8.0, attention_multiplier=0.1, embedding_multiplier=12.0, residual_multiplier=0.22
        )
    ),
    "granite with sinks": Family(
        lambda: GraniteSWAConfig(**TINY, **_MIXED, layer_rope_theta=[1e4, 0], attention_multiplier=0.2)
    ),
    "ministral": Family(lambda: MinistralConfig(**TINY, **_MIXED, head_dim=16)),
    "ministral 3": Family(
        lambda: Ministral3Config(
            **TINY,
            head_dim=16,
            rope_parameters={**_YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.3, "mscale": 1.0},
        )
    ),
    "smollm3": Family(lambda: SmolLM3Config(**TINY, **ENDS, no_rope_layers=[1, 0], mlp_bias=True)),
    "gpt-oss": Family(lambda: GptOssConfig(**TINY, **_MIXED, head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
}
SERVED_FAMILIES = (
    "qwen3",
    "qwen3-moe",
    "llama 3",
    "gemma 3",
    "phi 4 mini",
    "olmo 2",
    "olmo 3",
    "granite",
    "ministral 3",
    "smollm3",
    "gpt-oss",
)
"""Families of the models that most users serve, one form of each."""

_SIZES = {"vocab_size": 256, "initializer_range": 0.15}
OTHER_FORMS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**_SIZES, **ENDS, n_embd=64, n_layer=2, n_head=4, n_inner=96, n_positions=512),
    "dbrx": lambda: DbrxConfig(
        **_SIZES,
        **ENDS,
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=512,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    ),
}
"""Models that hold linear layers or experts in another form than most; see `unify_forms`."""


def save_random(config: PreTrainedConfig, path: Path) -> Path:
    """Write random weights of a configuration to a new directory and return it."""
    init_model(config, path, seed=1)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name, tensor in sorted(tensors.items()):
        if tensor.dim() == 1 or name.endswith("_bias"):
            tensors[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
