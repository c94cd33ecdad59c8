"""Describes the plain decoder that the fused backends run: which models are one, and each layer's weights.

The models are Llama, Mistral, Qwen2, Qwen3 and others with exactly their layers. A difference that the
configuration does not show is found at start, when `verify_backend` compares the logits with the model's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.model.attention.attention_inputs import AttentionParams
from baton.model.kernels.cpu.kernel_library import DTYPES
from baton.model.loading.model_support import kv_heads

SUPPORTED_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

Projection = TypeVar("Projection")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer(Generic[Projection]):
    """Weights of one layer. `Projection` is a backend's matrix product.

    qkv: one projection for queries, keys and values.
    q_norm, k_norm: [head_dim], or None if heads are not normalised.
    gate_up: one projection for the gate and the up projection.
    attention_params: scale and window of the layer's attention.
    """

    input_norm: torch.Tensor
    qkv: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Projection
    post_norm: torch.Tensor
    gate_up: Projection
    down: Projection
    attention_params: AttentionParams


def decoder_layers(
    model: PreTrainedModel, attention_params: Sequence[AttentionParams], make_projection: Callable[..., Projection]
) -> list[DecoderLayer[Projection]]:
    """Return the layers of a model for which `is_plain_decoder` is true.

    `attention_params`: one per layer, from `verify_masks`. `make_projection`: joins the given linear modules
    into one projection, with their outputs concatenated.
    """
    base: Any = model.base_model
    return [_layer(module, own, make_projection) for module, own in zip(base.layers, attention_params, strict=True)]


def _layer(
    module: Any, attention_params: AttentionParams, make_projection: Callable[..., Projection]
) -> DecoderLayer[Projection]:
    attention, mlp = module.self_attn, module.mlp
    return DecoderLayer(
        input_norm=module.input_layernorm.weight,
        qkv=make_projection(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        o=make_projection(attention.o_proj),
        post_norm=module.post_attention_layernorm.weight,
        gate_up=make_projection(mlp.gate_proj, mlp.up_proj),
        down=make_projection(mlp.down_proj),
        attention_params=attention_params,
    )


def rope_cos_sin(rotary: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RoPE's cosine and sine, each float32 [num_tokens, head_dim / 2].

    They are computed as the model does, but not rounded to its dtype.
    """
    angles = positions[:, None].float() * rotary.inv_freq[None, :]
    scaling = rotary.attention_scaling
    return angles.cos() * scaling, angles.sin() * scaling


def is_plain_decoder(model: PreTrainedModel) -> bool:
    """True if configuration and modules show that the model is this decoder, on a CPU."""
    config: Any = model.config
    return (
        type(model).__name__ in SUPPORTED_CLASSES
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and model.dtype in DTYPES
        and all(tensor.dtype == model.dtype and tensor.device.type == "cpu" for tensor in model.parameters())
        and _has_plain_modules(model)
    )


def _has_plain_modules(model: PreTrainedModel) -> bool:
    """True if all modules are plain, and have the shapes that `FusedForward` assumes in every layer."""
    config, base = cast(Any, model.config), cast(Any, model.base_model)
    _, head_dim = kv_heads(config)
    return (
        type(base.embed_tokens) is nn.Embedding
        and _are_linear([model.lm_head], config.hidden_size, config.vocab_size)
        and 2 * base.rotary_emb.inv_freq.numel() == head_dim  # partial RoPE is not supported
        and len(base.layers) == config.num_hidden_layers
        and _is_norm(base.norm, config.hidden_size, config)
        and all(_is_layer(layer, config) for layer in base.layers)
    )


def _is_layer(layer: Any, config: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    num_kv_heads, head_dim = kv_heads(config)
    hidden, inner, heads, kv = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * head_dim,
        num_kv_heads * head_dim,
    )
    joined = ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj])
    head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        _are_linear([attention.q_proj], hidden, heads)
        and _are_linear([attention.k_proj, attention.v_proj], hidden, kv)
        and _are_linear([attention.o_proj], heads, hidden)
        and _are_linear([mlp.gate_proj, mlp.up_proj], hidden, inner)
        and _are_linear([mlp.down_proj], inner, hidden)
        and all(len({module.bias is None for module in modules}) == 1 for modules in joined)
        and all(_is_norm(norm, hidden, config) for norm in (layer.input_layernorm, layer.post_attention_layernorm))
        and all(_is_norm(norm, head_dim, config) for norm in head_norms)
    )


def _are_linear(modules: Sequence[Any], num_in: int, num_out: int) -> bool:
    """True if all are `nn.Linear` itself, with this shape. A quantized or adapted layer has another type."""
    return all(type(module) is nn.Linear and module.weight.shape == (num_out, num_in) for module in modules)


def _is_norm(norm: Any, size: int, config: Any) -> bool:
    return norm.weight.shape == (size,) and norm.variance_epsilon == config.rms_norm_eps
