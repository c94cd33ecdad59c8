"""Defines named model shapes for benchmarks. Their random weights cost as much to run as the real ones."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from baton.core.errors import ModelError


def _tiny_42m() -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1_536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=16_384,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )


def _tiny_moe() -> PreTrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=4_096,
        hidden_size=256,
        intermediate_size=704,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> PreTrainedConfig:
    """Source: the configurations of Qwen/Qwen3-0.6B, Qwen3-4B and Qwen3-8B."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=tied,
    )


def _llama3_8b() -> PreTrainedConfig:
    """Source: the configuration of meta-llama/Llama-3.1-8B."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8_192,
        },
        tie_word_embeddings=False,
    )


def _gemma3_270m() -> PreTrainedConfig:
    """Source: the configuration of google/gemma-3-270m."""
    return Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2_048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )


SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "tiny-42m": _tiny_42m,
    "tiny-moe": _tiny_moe,
    "qwen3-0.6b": lambda: _qwen3(1_024, 3_072, 28, 16, True),
    "qwen3-4b": lambda: _qwen3(2_560, 9_728, 36, 32, True),
    "qwen3-8b": lambda: _qwen3(4_096, 12_288, 36, 32, False),
    "llama3-8b": _llama3_8b,
    "gemma3-270m": _gemma3_270m,
}
"""Configuration factories by the name that `baton model init --like` takes."""


def shape_config(name: str) -> PreTrainedConfig:
    """Return a new configuration of the named shape. Raises ModelError if the name is unknown."""
    if name not in SHAPES:
        near = get_close_matches(name, SHAPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ModelError(f"unknown shape {name!r}{hint} Known: {', '.join(SHAPES)}")
    return SHAPES[name]()
