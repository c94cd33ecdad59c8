"""Runs the plain decoder with torch's matrix products (oneDNN) and C++ kernels for everything between them.

The last layer computes only keys and values for tokens that are not sampled. Concatenated weights replace the
model's own, as views. Weights that oneDNN packs are held twice until verification ends, see
`release_model_weights`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from baton.model.attention.attention_inputs import AttentionParams
from baton.model.backends.decoder_layers import decoder_layers, rope_cos_sin
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.packed_linear import free_weights
from baton.model.step.forward import ForwardOutput, are_finite
from baton.model.step.step_inputs import PackedStep


class PackedLinear:
    """One linear product for several modules, outputs concatenated. Uses oneDNN's packed weights if
    available."""

    def __init__(self, *modules: nn.Linear) -> None:
        """`modules`: linear modules with the same input. Without oneDNN their weights become views of the
        joined weight."""
        self._modules = modules
        self._bias = None if modules[0].bias is None else _concatenate_in_place([module.bias for module in modules])
        self._is_packed = has_onednn_bf16_gemm(modules[0].weight.dtype)
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(
                torch.cat([module.weight.data for module in modules])
            )
        else:
            self._weight = _concatenate_in_place([module.weight for module in modules])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_packed:
            return linear(x, self._weight, self._bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def release_model_weights(self) -> None:
        """Free the modules' own weights if they are held packed here."""
        if self._is_packed:
            free_weights(self._modules)


class FusedForward:
    """Implements `Forward` for the plain decoder with torch's products and the C++ kernels."""

    def __init__(self, model: PreTrainedModel, attention_params: Sequence[AttentionParams], kernels: Kernels) -> None:
        """`model`: one for which `is_plain_decoder` is true; its own code still works. `attention_params`:
        one per layer, from `verify_masks`. `kernels`: with the number of threads of a step."""
        self._kernels = kernels
        base: Any = model.base_model
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._layers = decoder_layers(model, attention_params, PackedLinear)
        self._final_norm: torch.Tensor = base.norm.weight
        self._eps = float(model.config.rms_norm_eps)
        self._head = PackedLinear(cast(nn.Linear, model.lm_head))
        self._rotary: Any = base.rotary_emb
        self._vocab_size = int(model.config.vocab_size)

    def __call__(self, step: PackedStep) -> ForwardOutput:
        kernels, cache, rows = self._kernels, step.attention.cache, step.sample_rows
        tables, slots = step.attention.tables, step.attention.slots
        cosine, sine = rope_cos_sin(self._rotary, step.position_ids)
        hidden = self._embedding[step.token_ids]
        normed = kernels.rms_norm(hidden, None, self._layers[0].input_norm, self._eps)
        finite = torch.empty(0, dtype=torch.bool)
        for index, layer in enumerate(self._layers):
            is_last = index + 1 == len(self._layers)
            qkv = layer.qkv(normed)
            kernels.rope_and_store_kv(qkv, cache, index, slots, cosine, sine, layer.q_norm, layer.k_norm, self._eps)
            if is_last:
                finite = are_finite(qkv)
                if not rows.numel():
                    return ForwardOutput(logits=torch.empty(0, self._vocab_size), finite=finite)
                if rows.numel() < len(hidden):
                    qkv, hidden, tables = qkv[rows], hidden[rows], step.attention.tables_for_rows(rows.numpy())
            heads = qkv.view(len(hidden), -1, cache.head_dim)[:, : -2 * cache.num_kv_heads]
            attended = heads.new_empty(heads.shape)
            kernels.attend(heads, attended, cache, index, tables, layer.attention_params)
            normed = kernels.rms_norm(hidden, layer.o(attended.view(len(hidden), -1)), layer.post_norm, self._eps)
            more = layer.down(kernels.silu_gate(layer.gate_up(normed)))
            weight = self._final_norm if is_last else self._layers[index + 1].input_norm
            normed = kernels.rms_norm(hidden, more, weight, self._eps)
        finite[rows] &= are_finite(normed)
        return ForwardOutput(logits=self._head(normed), finite=finite)

    def release_model_weights(self) -> None:
        """Free the model's weights that are packed here; its own code then raises.

        The model keeps the embedding, norms, biases and unpacked weights. Tied embeddings are held twice:
        plain for look-up and packed for the product.
        """
        self._head.release_model_weights()
        for layer in self._layers:
            for projection in (layer.qkv, layer.o, layer.gate_up, layer.down):
                projection.release_model_weights()

    def close(self) -> None:
        """Do nothing: this pass installs nothing in the model."""


def has_onednn_bf16_gemm(dtype: torch.dtype) -> bool:
    """True if this build of torch and this processor support oneDNN's GEMM on packed bfloat16 weights."""
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _concatenate_in_place(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parameters concatenated by rows; each parameter becomes a view of the result."""
    if len(parameters) == 1:
        return parameters[0].data
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, joined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = rows
    return joined
