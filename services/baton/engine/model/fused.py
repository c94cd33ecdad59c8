"""The decoder that most models are, with our kernels: Llama, Mistral, Qwen2 and Qwen3, and whoever has exactly their layers.

One matrix product for queries, keys and values, one for the gate and what it gates, and between products one pass each. Weights that are
joined become the model's own, as views; weights that oneDNN packs are held twice until the proof is over, see `own_weights`. What an
architecture adds in silence, the worker's self-proof finds: it compares this with the model's own pass at every start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from baton.engine.model.attention_step import Asked
from baton.engine.model.forward import Forwarded, are_finite
from baton.engine.model.native.library import DTYPES, Kernels
from baton.engine.model.step_inputs import PackedStep
from baton.engine.model.supported import kv_heads

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """`q_norm`, `k_norm`: [head_dim], where heads are normed."""

    input_norm: torch.Tensor
    qkv: "_Linear"
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: "_Linear"
    post_norm: torch.Tensor
    gate_up: "_Linear"
    down: "_Linear"
    asked: Asked


class _Linear:
    """One product for several modules, one under the other: over weights in the layout that oneDNN computes with, where it has one."""

    def __init__(self, *modules: nn.Linear) -> None:
        self._modules = modules
        self._bias = None if modules[0].bias is None else _joined([module.bias for module in modules])
        self._is_packed = _can_pack(modules[0].weight.dtype)
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat([module.weight.data for module in modules]))
        else:
            self._weight = _joined([module.weight for module in modules])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_packed:
            return linear(x, self._weight, self._bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def own_weights(self) -> None:
        if self._is_packed:  # empty, not on the meta device, with whose weights oneDNN computes NaN without an error
            for module in self._modules:
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)


class FusedForward:
    """See the module. `kernels` of the threads that a step has."""

    def __init__(self, model: PreTrainedModel, asked: Sequence[Asked], kernels: Kernels) -> None:
        """`model`: one that `can_fuse`. `asked`: by each layer, see `prove_masks`. The model still runs by itself."""
        self._kernels = kernels
        base: Any = model.base_model
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._layers = [_layer(module, own) for module, own in zip(base.layers, asked, strict=True)]
        self._final_norm: torch.Tensor = base.norm.weight
        self._eps = float(model.config.rms_norm_eps)
        self._head = _Linear(cast(nn.Linear, model.lm_head))
        self._rotary: Any = base.rotary_emb
        self._vocab_size = int(model.config.vocab_size)

    def __call__(self, step: PackedStep) -> Forwarded:
        kernels, cache = self._kernels, step.attention.cache
        tables, slots = step.attention.tables, step.attention.slots
        cosine, sine = self._turns(step.position_ids)
        hidden = self._embedding[step.token_ids]
        normed = kernels.rms_norm(hidden, None, self._layers[0].input_norm, self._eps)
        num_tokens = hidden.shape[0]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(normed)
            kernels.turn_and_store(qkv, cache, index, slots, cosine, sine, layer.q_norm, layer.k_norm, self._eps)
            heads = qkv.view(num_tokens, -1, cache.head_dim)[:, : -2 * cache.num_kv_heads]
            attended = heads.new_empty(heads.shape)
            kernels.attend(heads, attended, cache, index, tables, layer.asked)
            normed = kernels.rms_norm(hidden, layer.o(attended.view(num_tokens, -1)), layer.post_norm, self._eps)
            more = layer.down(kernels.silu_gate(layer.gate_up(normed)))
            is_last = index + 1 == len(self._layers)
            weight = self._final_norm if is_last else self._layers[index + 1].input_norm
            normed = kernels.rms_norm(hidden, more, weight, self._eps)
        if not step.sample_rows.numel():
            return Forwarded(logits=torch.empty(0, self._vocab_size), finite=are_finite(normed))
        return Forwarded(logits=self._head(normed[step.sample_rows]), finite=are_finite(normed))

    def own_weights(self) -> None:
        """Take what is packed out of the model: those parameters are empty afterwards, so its own code raises. What is left to it is the
        embedding, norms, biases and whatever is not packed. Tied embeddings are held both ways: rows are looked up plain and multiplied
        packed."""
        self._head.own_weights()
        for layer in self._layers:
            for product in (layer.qkv, layer.o, layer.gate_up, layer.down):
                product.own_weights()

    def close(self) -> None:
        """Nothing was put into the model."""

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cosine, sine [num_tokens, head_dim / 2] float32, as the model's own rotary embedding has them before it rounds."""
        angles = positions[:, None].float() * self._rotary.inv_freq[None, :]
        by = self._rotary.attention_scaling
        return angles.cos() * by, angles.sin() * by


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `FusedForward` is this model, as far as its configuration and modules tell."""
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
    """Plain modules, of the same sizes in every layer, that fit into each other as `FusedForward` takes for granted."""
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
    hidden, inner, heads, kv = config.hidden_size, config.intermediate_size, config.num_attention_heads * head_dim, num_kv_heads * head_dim
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


def _layer(module: Any, asked: Asked) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    return _Layer(
        input_norm=module.input_layernorm.weight,
        qkv=_Linear(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        o=_Linear(attention.o_proj),
        post_norm=module.post_attention_layernorm.weight,
        gate_up=_Linear(mlp.gate_proj, mlp.up_proj),
        down=_Linear(mlp.down_proj),
        asked=asked,
    )


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and this processor have oneDNN's products of packed weights."""
    return dtype == torch.bfloat16 and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of them, one under the other; each becomes a view of it."""
    if len(parameters) == 1:
        return parameters[0].data
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = rows
    return whole
