"""The decoder that most models are, with our kernels: Llama, Mistral, Qwen2 and Qwen3, and whoever has exactly their layers.

One matrix product for queries, keys and values, one for the gate and what it gates, and between products one pass each. The weights are
the model's own: its parameters become views of the joined ones, so nothing is held twice and the model still runs by itself. What an
architecture adds in silence, the worker's self-proof finds: it compares this with the model's own pass at every start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from baton.engine.model.attention_step import Asked
from baton.engine.model.forward import Forwarded, are_finite
from baton.engine.model.native.library import DTYPES, Kernels
from baton.engine.model.step_inputs import PackedStep

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
    """Weights in the layout that oneDNN computes with, made once; plain where it has none."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._packed: torch.Tensor | None = None
        if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return linear(x, self._weight, self._bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class FusedForward:
    """See the module. Takes over the parameters of `model`; `kernels` of the threads that a step has."""

    def __init__(self, model: PreTrainedModel, asked: Sequence[Asked], kernels: Kernels) -> None:
        """`asked`: by each layer, see `prove_masks`."""
        self._kernels = kernels
        base: Any = model.base_model
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._layers = [_layer(module, own) for module, own in zip(base.layers, asked, strict=True)]
        self._final_norm: torch.Tensor = base.norm.weight
        self._eps = float(model.config.rms_norm_eps)
        head: Any = model.lm_head
        self._head = _Linear(head.weight, head.bias)
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

    def close(self) -> None:
        """The model has its parameters, as views."""

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cosine, sine [num_tokens, head_dim / 2] float32, as the model's own rotary embedding has them before it rounds."""
        angles = positions[:, None].float() * self._rotary.inv_freq[None, :]
        by = self._rotary.attention_scaling
        return angles.cos() * by, angles.sin() * by


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `FusedForward` is this model, as far as its configuration tells."""
    config: Any = model.config
    return (
        type(model).__name__ in FAMILY
        and model.device.type == "cpu"
        and model.dtype in DTYPES
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
    )


def _layer(module: Any, asked: Asked) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    return _Layer(
        input_norm=module.input_layernorm.weight,
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        o=_Linear(attention.o_proj.weight, attention.o_proj.bias),
        post_norm=module.post_attention_layernorm.weight,
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=_Linear(mlp.down_proj.weight, mlp.down_proj.bias),
        asked=asked,
    )


def _joined(modules: Sequence[nn.Linear]) -> _Linear:
    """One product for all of them, one under the other."""
    weight = torch.cat([module.weight.data for module in modules])
    biases = [module.bias for module in modules]
    bias = None if any(one is None for one in biases) else torch.cat([one.data for one in biases])
    row = 0
    for module in modules:
        module.weight.data = weight[row : row + module.out_features]
        row += module.out_features
    return _Linear(weight, bias)
