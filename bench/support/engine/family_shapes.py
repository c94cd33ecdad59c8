"""Model families with the widths of a published model and few layers, for the share of the roofline."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from bench.support.roofline import Needs

LAYERS = 4
"""Layers of each model. More would only repeat the same products."""
NUM_EXPERTS = 32
"""Instead of 128 in Qwen3-30B-A3B, for memory. A token still computes eight."""
_COMMON: Mapping[str, Any] = {"num_hidden_layers": LAYERS, "max_position_embeddings": 8192}
_ENDS: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
"""Token ids of configurations whose own defaults lie outside of a small vocabulary."""


def _sizes(hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> dict[str, Any]:
    return {
        **_COMMON,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


FAMILY_SHAPES: Mapping[str, tuple[str, Callable[[], PreTrainedConfig]]] = {
    "qwen3": (
        "Qwen3-0.6B",
        lambda: Qwen3Config(**_sizes(1024, 3072, 16, 8, 151_936, tied=True), head_dim=128),
    ),
    "qwen3-moe": (
        "Qwen3-30B-A3B",
        lambda: Qwen3MoeConfig(
            **_sizes(2048, 6144, 32, 4, 151_936, tied=False) | {"head_dim": 128},
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    "llama-3": ("Llama-3.2-1B", lambda: LlamaConfig(**_sizes(2048, 8192, 32, 8, 128_256, tied=True), head_dim=64)),
    "gemma-3": (
        "gemma-3-270m",
        lambda: Gemma3TextConfig(
            **_sizes(640, 2048, 4, 1, 262_144, tied=True),
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=512,
            layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        ),
    ),
    "phi-4": (
        "Phi-4-mini",
        lambda: Phi3Config(**_sizes(3072, 8192, 24, 8, 200_064, tied=True) | {"partial_rotary_factor": 0.75}, **_ENDS),
    ),
    "phi-3": ("Phi-3-mini", lambda: Phi3Config(**_sizes(3072, 8192, 32, 32, 32_064, tied=False), **_ENDS)),
    "olmo-2": ("OLMo-2-0425-1B", lambda: Olmo2Config(**_sizes(2048, 8192, 16, 16, 100_352, tied=False))),
    "olmo-3": (
        "Olmo-3-7B",
        lambda: Olmo3Config(
            **_sizes(4096, 11_008, 32, 32, 100_278, tied=False),
            sliding_window=4096,
            layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        ),
    ),
    "granite": (
        "granite-3.3-2b",
        lambda: GraniteConfig(
            **_sizes(2048, 8192, 32, 8, 49_159, tied=True),
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=1 / 64,
            logits_scaling=8.0,
        ),
    ),
    "ministral-3": (
        "Ministral-3-3B",
        lambda: Ministral3Config(**_sizes(3072, 9216, 32, 8, 131_072, tied=True), head_dim=128),
    ),
    "smollm3": (
        "SmolLM3-3B",
        lambda: SmolLM3Config(
            **_sizes(2048, 11_008, 16, 4, 128_256, tied=True),
            **_ENDS,
            no_rope_layers=[int((layer + 1) % 4 != 0) for layer in range(LAYERS)],
        ),
    ),
}
"""By family: the model whose widths these are, and the configuration."""


def family_needs(directory: Path) -> Needs:
    """Return the needs of a model at batch 1. Of experts only those count that a token computes."""
    config: Any = AutoConfig.from_pretrained(directory)
    needs = Needs.of(directory)
    num_experts = getattr(config, "num_experts", 0)
    if not num_experts:
        return needs
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    unused = (num_experts - config.num_experts_per_tok) * expert
    heads = 2 * config.num_attention_heads * needs.head_dim
    end_params = config.vocab_size * config.hidden_size + config.hidden_size * heads
    return replace(
        needs,
        weight_params=needs.weight_params - config.num_hidden_layers * unused,
        end_params=end_params + config.num_experts_per_tok * expert,
    )
