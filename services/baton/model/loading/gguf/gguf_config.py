"""Builds the transformers configuration of a GGUF file from its metadata and its table of tensors."""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_architectures import architecture_of
from baton.model.loading.gguf.gguf_metadata import GgufMetadata

_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
LONGROPE_TENSORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""Tensors with divisors of the rotary frequencies of longrope, by the name of the parameter."""
MAX_HEAD_DIM = 1 << 14
"""Largest head size. It bounds the frequencies that are computed before any weight is read."""


def gguf_config(
    metadata: GgufMetadata, shapes: Mapping[str, tuple[int, ...]], divisors: Mapping[str, list[float]] | None = None
) -> dict[str, Any]:
    """Return the content of config.json.

    shapes: of the file's tensors, by name, rows first. divisors: values of those of `LONGROPE_TENSORS` that
    it has, by name. Raises ModelError if the architecture is not supported, or if values are missing.
    """
    architecture = architecture_of(metadata)
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelError(f"{metadata.path} has no usable tensor token_embd.weight; download or copy it again")
    heads = metadata.integer("attention.head_count")
    hidden = metadata.integer("embedding_length")
    if not heads:
        raise metadata.problem(f"{metadata.architecture}.attention.head_count", heads, "at least 1")
    head_dim = metadata.optional_integer("attention.key_length") or hidden // heads
    num_layers = metadata.integer("block_count")
    for key, value, limit in (
        ("embedding_length", hidden, embedding[1]),
        ("block_count", num_layers, len(shapes)),  # a layer has several tensors
        ("attention.key_length", head_dim, MAX_HEAD_DIM),
    ):
        if value > limit:
            raise metadata.problem(f"{metadata.architecture}.{key}", value, f"at most {limit}")
    common = {
        "model_type": architecture.model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.optional_integer("feed_forward_length") or 0,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.optional_integer("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(metadata, head_dim, divisors or {}),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        **{name: metadata.token_id(key) for name, key in _TOKEN_IDS.items()},
    }
    return common | architecture.config(metadata, common)


def _rope_parameters(metadata: GgufMetadata, head_dim: int, divisors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the rotary parameters. The divisors of Llama 3 are applied later, at loading."""
    kind = metadata.optional_text(f"{metadata.architecture}.rope.scaling.type") or "none"
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.optional_number("rope.freq_base") or 10_000.0,
    }
    dimensions = metadata.optional_integer("rope.dimension_count") or head_dim
    if dimensions < head_dim:
        rope["partial_rotary_factor"] = dimensions / head_dim
    if divisors:
        return rope | _longrope(metadata, dimensions // 2, divisors)
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{metadata.path} has rotary scaling of type {kind!r}; must be none, linear or yarn")
    rope |= {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if (value := metadata.optional_number(f"rope.scaling.yarn_{key}")) is not None:
                rope[key] = value
        for key in ("attn_factor", "yarn_attn_factor"):  # the second is that of the checkpoint's configuration
            if (factor := metadata.optional_number(f"rope.scaling.{key}")) is not None:
                rope["attention_factor"] = factor
    return rope


def _longrope(metadata: GgufMetadata, number: int, divisors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the parameters of frequencies with divisors up to a length, and other ones beyond it."""
    for name in LONGROPE_TENSORS.values():
        if len(divisors.get(name, ())) != number:
            raise ModelError(
                f"{metadata.path} has a rotary embedding of type longrope, and {len(divisors.get(name, ()))} values in "
                f"{name}; must be {number}. Download or copy it again"
            )
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
        **{key: divisors[name] for key, name in LONGROPE_TENSORS.items()},
    }
