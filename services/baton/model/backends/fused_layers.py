"""Runs a decoder of a known form with torch's matrix products (oneDNN) and C++ kernels for everything
between.

The last layer computes only keys and values for tokens that are not sampled. Concatenated weights replace the
model's own, as views. Weights that oneDNN packs are held twice until verification ends, see
`release_model_weights`. Mixtures of experts run by the model's own code.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from baton.core.errors import LayoutMismatch
from baton.model.backends.decoder_layers import DecoderLayer, decoder_layers
from baton.model.forms.decoder_form import DecoderForm, ExpertsForm
from baton.model.kernels.cpu.kernel_args import MAX_HEAD_DIM
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
        self._bias = _joined_bias(modules)
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
    """Implements `Forward` for a decoder of a known form with torch's products and the C++ kernels."""

    def __init__(self, form: DecoderForm, kernels: Kernels) -> None:
        """`form`: of a model whose own code still works afterwards. `kernels`: with the number of threads of
        a step."""
        self._kernels = kernels
        self._form = form
        self._layers = decoder_layers(form, PackedLinear)
        self._head = PackedLinear(form.head)  # type: ignore[arg-type]  # a form's products are nn.Linear

    def __call__(self, step: PackedStep) -> ForwardOutput:
        kernels, form, cache, rows = self._kernels, self._form, step.attention.cache, step.sample_rows
        num_kv_heads, head_dim = cache.uniform_shape
        _require_small_heads(head_dim)
        tables, slots = step.attention.tables, step.attention.slot_mapping
        rotaries = [rotary.at(step.position_ids) for rotary in form.rotaries]
        query_scale = None if form.query_scale is None else form.query_scale.at(step.position_ids)
        hidden = form.embed(step.token_ids)
        added, after, multiplier = None, None, 1.0
        finite = torch.empty(0, dtype=torch.bool)
        for index, layer in enumerate(self._layers):
            own = layer.form
            normed = kernels.add_and_norm(hidden, added, own.before_attention, after=after, multiplier=multiplier)
            qkv = layer.qkv(normed)
            rotary = None if own.rotary is None else rotaries[own.rotary]
            if index + 1 == len(self._layers):
                finite = are_finite(qkv)
            kernels.rope_and_store_kv(qkv, cache, index, slots, rotary, own.head_norms, query_scale)
            if index + 1 == len(self._layers):
                if not rows.numel():
                    return ForwardOutput(logits=torch.empty(0, form.vocab_size), finite=finite)
                if rows.numel() < len(hidden):
                    qkv, hidden, tables = qkv[rows], hidden[rows], step.attention.tables_for_rows(rows.numpy())
            heads = qkv.view(len(hidden), -1, head_dim)[:, : -2 * num_kv_heads]
            attended = heads.new_empty(heads.shape)
            kernels.attend(heads, attended, cache, index, tables, own.attention_params)
            added = layer.o(attended.view(len(hidden), -1))
            multiplier = own.multiplier
            normed = kernels.add_and_norm(
                hidden, added, own.before_mlp, after=own.after_attention, multiplier=multiplier
            )
            added, after = self._mlp(layer, normed), own.after_mlp
        normed = kernels.add_and_norm(hidden, added, form.final_norm, after=after, multiplier=multiplier)
        finite[rows] &= are_finite(normed)
        return ForwardOutput(logits=form.finish_logits(self._head(normed)), finite=finite)

    def _mlp(self, layer: DecoderLayer[PackedLinear], x: torch.Tensor) -> torch.Tensor:
        mlp = layer.form.mlp
        if isinstance(mlp, ExpertsForm):
            out: Any = mlp.module(x[None])
            mixed: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]
            return mixed
        assert layer.gate_up is not None
        assert layer.down is not None
        return layer.down(self._kernels.gate(layer.gate_up(x), mlp.gate))

    def release_model_weights(self) -> None:
        """Free the model's weights that are packed here; its own code then raises.

        The model keeps the embedding, norms, biases and unpacked weights. Tied embeddings are held twice:
        plain for look-up and packed for the product.
        """
        self._head.release_model_weights()
        for layer in self._layers:
            for projection in layer.projections():
                projection.release_model_weights()

    def close(self) -> None:
        """Do nothing: this pass installs nothing in the model."""


def _require_small_heads(head_dim: int) -> None:
    if head_dim > MAX_HEAD_DIM:
        raise LayoutMismatch(f"heads of {head_dim} numbers; the kernels take at most {MAX_HEAD_DIM}")


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


def _joined_bias(modules: Sequence[nn.Linear]) -> torch.Tensor | None:
    """Return the biases of modules with one input, concatenated; zeros for those without, None without
    any."""
    if all(module.bias is None for module in modules):
        return None
    return torch.cat(
        [module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias.data for module in modules]
    )
