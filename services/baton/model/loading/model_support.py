"""Checks from its configuration and class if a model can be served from paged KV memory.

This needs no weights, so an unsupported model is refused early.
"""

from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from baton.core.errors import ModelError
from baton.model.loading.quantised.layouts import layout_of
from baton.model.loading.text_part import text_model_class

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layer types that can be served."""
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""RoPE types whose frequencies depend only on the position.

Those of `dynamic` and `longrope` change with the longest position in the batch.
"""
OVERFLOWS_FLOAT16 = frozenset({"gemma2", "gemma3_text", "glm4"})
"""Model types whose activations exceed the range of float16. Source: vLLM's list of them."""
LONGROPE = "longrope"
"""RoPE type that can be served up to the length from which on its frequencies change."""


def causal_lm_class(
    config: PreTrainedConfig, *, is_text_part: bool = False, max_model_len: int | None = None
) -> type[PreTrainedModel]:
    """Return the class that runs this configuration. Raises ModelError if it cannot be served.

    is_text_part: the configuration is that of the text part of a composite model, see `text_part.py`.
    max_model_len: the longest context that is served; None: the model's own.

    A model of the wrong kind, such as an encoder-decoder, is refused for that alone. Otherwise the error
    names every unsupported property.
    """
    name = f"{config.model_type} ({', '.join(config.architectures or ()) or 'no architecture named'})"
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model; only decoder-only language models can be served")
    if config.get_text_config() is not config:
        raise ModelError(f"{name} is a composite model with a text part; give the configuration of that part")
    model_class = None
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    elif is_text_part:
        model_class = text_model_class(config)
    if model_class is None:
        raise ModelError(f"transformers has no causal language model for {name}")
    problems = _problems(config, model_class, max_model_len)
    if problems:
        raise ModelError(f"{name} cannot be served: {'; '.join(problems)}")
    return model_class


def _problems(config: PreTrainedConfig, model_class: type[PreTrainedModel], max_model_len: int | None) -> list[str]:
    problems = []
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        try:
            layout_of(quantization)
        except ModelError as error:
            problems.append(str(error))
    if not getattr(model_class, "_supports_attention_backend", False):
        problems.append(f"{model_class.__name__} does not support attention backends (_supports_attention_backend)")
    if getattr(model_class, "_is_stateful", False):
        problems.append(f"{model_class.__name__} keeps a recurrent state beside its KV")
    strange = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - LAYER_TYPES)
    if strange:
        problems.append(f"layer types {', '.join(strange)}; every layer must be full or sliding attention")
    if getattr(config, "attention_chunk_size", None) is not None:
        problems.append("chunked attention (attention_chunk_size)")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        problems.append("a soft cap on attention logits (attn_logit_softcapping)")
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        problems.append("bidirectional attention")
    found, short_len = _rope_types(config), _short_rope_len(config)
    longest = max_model_len or getattr(config, "max_position_embeddings", 0)
    if LONGROPE in found and short_len is not None and isinstance(longest, int) and longest > short_len:
        problems.append(
            f"its rotary embedding ({LONGROPE}) changes with the longest position beyond {short_len} positions; "
            f"give --max-model-len {short_len} or less"
        )
    rope_types = sorted(found - ROPE_TYPES - ({LONGROPE} if short_len else set()))
    if rope_types:
        problems.append(
            f"rotary embedding of type {', '.join(rope_types)}, which is not one of {', '.join(sorted(ROPE_TYPES))}"
        )
    numbers = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")
    lacking = [key for key in numbers if not isinstance(getattr(config, key, None), int)]
    if lacking:
        problems.append(f"its configuration has no single number {', '.join(lacking)}")
    if not isinstance(getattr(config, "num_key_value_heads", 1) or 1, int):
        problems.append("layers have different numbers of KV heads (num_key_value_heads)")
    return problems


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Return every RoPE type in the configuration.

    In transformers 5, `rope_parameters` is one dict, or one for each layer type.
    """
    found: set[str] = set()
    for attribute in ("rope_parameters", "rope_scaling"):
        parameters: Any = getattr(config, attribute, None)
        if not isinstance(parameters, dict):
            continue
        entries = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
        found.update(str(entry.get("rope_type") or entry.get("type") or "default") for entry in entries)
    return found


def _short_rope_len(config: PreTrainedConfig) -> int | None:
    """Return the number of positions for which `longrope` has its short frequencies; None if it is not
    given."""
    parameters = getattr(config, "rope_parameters", None)
    length = parameters.get("original_max_position_embeddings") if isinstance(parameters, dict) else None
    return length if isinstance(length, int) else None


def kv_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Return (number of KV heads, head size) from the configuration.

    If a layer then caches another shape, attention raises an error.
    """
    heads = config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or heads, getattr(
        config, "head_dim", None
    ) or config.hidden_size // heads
