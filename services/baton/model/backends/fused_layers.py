"""The decoder that most models are with torch's products, through oneDNN, and our kernels between them, one
pass each. In the last layer only those tokens that are sampled from are more than keys and values.

Weights that are joined become the model's own, as views; weights that oneDNN packs are held twice until the
proof is over, see `own_weights`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from baton.model.attention.attention_inputs import Asked
from baton.model.backends.decoder_layers import decoder_layers, take_weights, turns
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.step.forward import Forwarded, are_finite
from baton.model.step.step_inputs import PackedStep


class PackedLinear:
    """One product for several modules, one under the other: over weights in the layout that oneDNN computes
    with, where it has one."""

    def __init__(self, *modules: nn.Linear) -> None:
        self._modules = modules
        self._bias = None if modules[0].bias is None else _joined([module.bias for module in modules])
        self._is_packed = has_onednn_products(modules[0].weight.dtype)
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(
                torch.cat([module.weight.data for module in modules])
            )
        else:
            self._weight = _joined([module.weight for module in modules])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_packed:
            return linear(x, self._weight, self._bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def own_weights(self) -> None:
        if self._is_packed:
            take_weights(self._modules)


class FusedForward:
    """See the module. `kernels` of the threads that a step has."""

    def __init__(self, model: PreTrainedModel, asked: Sequence[Asked], kernels: Kernels) -> None:
        """`model`: one that `can_fuse`. `asked`: by each layer, see `prove_masks`. The model still runs by
        itself."""
        self._kernels = kernels
        base: Any = model.base_model
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._layers = decoder_layers(model, asked, PackedLinear)
        self._final_norm: torch.Tensor = base.norm.weight
        self._eps = float(model.config.rms_norm_eps)
        self._head = PackedLinear(cast(nn.Linear, model.lm_head))
        self._rotary: Any = base.rotary_emb
        self._vocab_size = int(model.config.vocab_size)

    def __call__(self, step: PackedStep) -> Forwarded:
        kernels, cache, rows = self._kernels, step.attention.cache, step.sample_rows
        tables, slots = step.attention.tables, step.attention.slots
        cosine, sine = turns(self._rotary, step.position_ids)
        hidden = self._embedding[step.token_ids]
        normed = kernels.rms_norm(hidden, None, self._layers[0].input_norm, self._eps)
        finite = torch.empty(0, dtype=torch.bool)
        for index, layer in enumerate(self._layers):
            is_last = index + 1 == len(self._layers)
            qkv = layer.qkv(normed)
            kernels.turn_and_store(qkv, cache, index, slots, cosine, sine, layer.q_norm, layer.k_norm, self._eps)
            if is_last:
                finite = are_finite(qkv)
                if not rows.numel():
                    return Forwarded(logits=torch.empty(0, self._vocab_size), finite=finite)
                if rows.numel() < len(hidden):
                    qkv, hidden, tables = qkv[rows], hidden[rows], step.attention.tables_of(rows.numpy())
            heads = qkv.view(len(hidden), -1, cache.head_dim)[:, : -2 * cache.num_kv_heads]
            attended = heads.new_empty(heads.shape)
            kernels.attend(heads, attended, cache, index, tables, layer.asked)
            normed = kernels.rms_norm(hidden, layer.o(attended.view(len(hidden), -1)), layer.post_norm, self._eps)
            more = layer.down(kernels.silu_gate(layer.gate_up(normed)))
            weight = self._final_norm if is_last else self._layers[index + 1].input_norm
            normed = kernels.rms_norm(hidden, more, weight, self._eps)
        finite[rows] &= are_finite(normed)
        return Forwarded(logits=self._head(normed), finite=finite)

    def own_weights(self) -> None:
        """Take what is packed out of the model: those parameters are empty afterwards, so its own code
        raises. What is left to it is the embedding, norms, biases and whatever is not packed. Tied embeddings
        are held both ways: rows are looked up plain and multiplied packed."""
        self._head.own_weights()
        for layer in self._layers:
            for product in (layer.qkv, layer.o, layer.gate_up, layer.down):
                product.own_weights()

    def close(self) -> None:
        """Nothing was put into the model."""


def has_onednn_products(dtype: torch.dtype) -> bool:
    """Whether this build and this processor have oneDNN's products of packed weights."""
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of them, one under the other; each becomes a view of it."""
    if len(parameters) == 1:
        return parameters[0].data
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = rows
    return whole
