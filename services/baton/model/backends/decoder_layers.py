"""The decoder that most models are, which models are it, and what each of its layers consists of: Llama,
Mistral, Qwen2 and Qwen3, and whoever has exactly their layers.

What an architecture adds in silence, the worker's self-proof finds: it compares what we compute with the
model's own pass at every start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.model.attention.attention_inputs import Asked
from baton.model.kernels.cpu.kernel_library import DTYPES
from baton.model.loading.model_support import kv_heads

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer(Generic[P]):
    """Its weights; `P`: a matrix product. One is for queries, keys and values, one for the gate and what it
    gates. `q_norm`, `k_norm`: [head_dim], where heads are normed."""

    input_norm: torch.Tensor
    qkv: P
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: P
    post_norm: torch.Tensor
    gate_up: P
    down: P
    asked: Asked


def decoder_layers(model: PreTrainedModel, asked: Sequence[Asked], product: Callable[..., P]) -> list[DecoderLayer[P]]:
    """Of a model that `can_fuse`. `asked`: by each layer, see `prove_masks`. `product`: one for several
    modules, one under the other."""
    base: Any = model.base_model
    return [_layer(module, own, product) for module, own in zip(base.layers, asked, strict=True)]


def _layer(module: Any, asked: Asked, product: Callable[..., P]) -> DecoderLayer[P]:
    attention, mlp = module.self_attn, module.mlp
    return DecoderLayer(
        input_norm=module.input_layernorm.weight,
        qkv=product(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        o=product(attention.o_proj),
        post_norm=module.post_attention_layernorm.weight,
        gate_up=product(mlp.gate_proj, mlp.up_proj),
        down=product(mlp.down_proj),
        asked=asked,
    )


def take_weights(modules: Sequence[nn.Linear]) -> None:
    """Out of the model: they are held packed. Those parameters are empty afterwards, so its own code raises.
    Not on the meta device, with whose weights oneDNN computes NaN without an error."""
    for module in modules:
        module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)


def turns(rotary: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cosine, sine [num_tokens, head_dim / 2] float32, as the model's own rotary embedding has them before it
    rounds."""
    angles = positions[:, None].float() * rotary.inv_freq[None, :]
    by = rotary.attention_scaling
    return angles.cos() * by, angles.sin() * by


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether this decoder is the model, as far as its configuration and modules tell."""
    config: Any = model.config
    return (
        type(model).__name__ in FAMILY
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and model.dtype in DTYPES
        and all(tensor.dtype == model.dtype and tensor.device.type == "cpu" for tensor in model.parameters())
        and _is_decoder(model)
    )


def _is_decoder(model: PreTrainedModel) -> bool:
    """Plain modules, of the same sizes in every layer, that fit into each other as `FusedForward` takes for
    granted."""
    config, base = cast(Any, model.config), cast(Any, model.base_model)
    _, head_dim = kv_heads(config)
    return (
        type(base.embed_tokens) is nn.Embedding
        and _are_plain([model.lm_head], config.hidden_size, config.vocab_size)
        and 2 * base.rotary_emb.inv_freq.numel() == head_dim  # a rotary of a part of each head is not ours
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
        _are_plain([attention.q_proj], hidden, heads)
        and _are_plain([attention.k_proj, attention.v_proj], hidden, kv)
        and _are_plain([attention.o_proj], heads, hidden)
        and _are_plain([mlp.gate_proj, mlp.up_proj], hidden, inner)
        and _are_plain([mlp.down_proj], inner, hidden)
        and all(len({module.bias is None for module in modules}) == 1 for modules in joined)
        and all(_is_norm(norm, hidden, config) for norm in (layer.input_layernorm, layer.post_attention_layernorm))
        and all(_is_norm(norm, head_dim, config) for norm in head_norms)
    )


def _are_plain(modules: Sequence[Any], num_in: int, num_out: int) -> bool:
    """Of exactly this type: whoever quantizes or adapts a layer makes another of it."""
    return all(type(module) is nn.Linear and module.weight.shape == (num_out, num_in) for module in modules)


def _is_norm(norm: Any, size: int, config: Any) -> bool:
    return norm.weight.shape == (size,) and norm.variance_epsilon == config.rms_norm_eps
