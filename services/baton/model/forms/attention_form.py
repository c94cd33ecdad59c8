"""Finds the form of a layer's attention: projections, norms of heads and rotary embedding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from baton.model.forms.decoder_form import (
    FormUnknown,
    QueryScaleForm,
    RotaryForm,
)
from baton.model.forms.model_trace import AttentionCall, ModelTrace, ModuleCall
from baton.model.forms.recognise import apply_norm, as_rms_norm, is_linear, is_table_of, near, rotate, table_of
from baton.model.kernels.layer_values import HeadNorms, RmsNorm, Rotary

_JOINED, _SEPARATE = ("qkv_proj",), ("q_proj", "k_proj", "v_proj")
_OUTPUTS = ("o_proj", "dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Form of the attention of one layer; the fields are as in `LayerForm`."""

    qkv: tuple[nn.Module, ...]
    head_norms: HeadNorms
    rotary: int | None
    o: nn.Module


def describe_attention(
    trace: ModelTrace,
    attention: ModuleCall,
    layer: int,
    rotaries: Sequence[RotaryForm],
    query_scale: QueryScaleForm | None,
) -> AttentionForm:
    """Return the form of the attention of layer number `layer`.

    `rotaries`: those of the model. Raises FormUnknown if queries, keys, values or output are computed
    otherwise.
    """
    module = attention.module
    attended = trace.attention.get(layer)
    if attended is None:
        raise FormUnknown(f"{type(module).__name__} does not attend with the layer's own index")
    qkv, outputs = _qkv(trace, attention, attended)
    o = _linear(module, _OUTPUTS)
    if not torch.equal(trace.of(o).hidden, attended.out.flatten(1)):
        raise FormUnknown(f"{type(module).__name__} changes attention's result before its output projection")
    if not torch.equal(attention.first_output, trace.of(o).first_output):
        raise FormUnknown(f"{type(module).__name__} changes the result of its output projection")
    norms = _head_norms(module, attended)
    tables: list[tuple[int | None, Rotary | None]] = [(None, None)]
    own = _rotary(trace, attention, rotaries)
    if own is not None:
        tables.insert(0, (own, rotaries[own].at(trace.positions)))
    for index, table in tables:
        if _is_rotated(trace, attended, outputs, norms, table, query_scale):
            return AttentionForm(qkv=qkv, head_norms=norms, rotary=index, o=o)
    raise FormUnknown(f"{type(module).__name__} computes queries or keys in another way than norm, then RoPE")


def _qkv(
    trace: ModelTrace, attention: ModuleCall, attended: AttentionCall
) -> tuple[tuple[nn.Module, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return (modules, what they gave as queries, keys and values)."""
    module = attention.module
    names = next((names for names in (_JOINED, _SEPARATE) if all(hasattr(module, name) for name in names)), None)
    if names is None:
        raise FormUnknown(f"{type(module).__name__} has neither {_JOINED[0]} nor {', '.join(_SEPARATE)}")
    modules = tuple(_linear(module, (name,)) for name in names)
    calls = [trace.of(each) for each in modules]
    if not all(torch.equal(call.hidden, attention.hidden) for call in calls):
        raise FormUnknown(f"{type(module).__name__} changes its input before the projections")
    sizes = [part.flatten(1).shape[1] for part in (attended.query, attended.key, attended.value)]
    joined = torch.cat([call.first_output for call in calls], dim=1)
    if joined.shape[1] != sum(sizes):
        raise FormUnknown(f"{type(module).__name__} projects to {joined.shape[1]} numbers, not {sum(sizes)}")
    query, key, value = joined.split(sizes, dim=1)
    if not torch.equal(value, attended.value.flatten(1)):
        raise FormUnknown(f"{type(module).__name__} changes its values after the projection")
    return modules, (query, key, value)


def _linear(module: nn.Module, names: Sequence[str]) -> nn.Module:
    for name in names:
        found = getattr(module, name, None)
        if found is not None and is_linear(found):
            return found
    raise FormUnknown(f"{type(module).__name__} has no plain linear {' or '.join(names)}")


def _head_norms(module: nn.Module, attended: AttentionCall) -> HeadNorms:
    norms: list[RmsNorm | None] = []
    for name, heads in (("q_norm", attended.query), ("k_norm", attended.key)):
        own = getattr(module, name, None)
        own = None if isinstance(own, nn.Identity) else own
        norm = None if own is None else as_rms_norm(own)
        if own is not None and norm is None:
            raise FormUnknown(f"{name} of {type(module).__name__} is not an RMS norm")
        norms.append(norm)
        if norm is not None and norm.factor.numel() not in (heads.shape[2], heads.shape[1] * heads.shape[2]):
            raise FormUnknown(f"{name} has {norm.factor.numel()} weights for heads {tuple(heads.shape[1:])}")
    over_all = [norm is not None and norm.factor.numel() != attended.query.shape[2] for norm in norms]
    q, k = norms
    if q is not None and k is not None and over_all[0] != over_all[1] and attended.key.shape[1] > 1:
        raise FormUnknown("queries and keys are normalised over different sizes")
    return HeadNorms(q=q, k=k, over_all_heads=any(over_all))


def _rotary(trace: ModelTrace, attention: ModuleCall, rotaries: Sequence[RotaryForm]) -> int | None:
    """Return the index of the rotary embedding that a layer receives, or None if it receives none."""
    embeddings = attention.keywords.get("position_embeddings")
    if embeddings is None:
        return None
    table = table_of(embeddings)
    for index, form in enumerate(rotaries):
        if is_table_of(form, table, trace.positions):
            return index
    raise FormUnknown("its rotary embedding is not position times frequency")


def _is_rotated(
    trace: ModelTrace,
    attended: AttentionCall,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norms: HeadNorms,
    table: Rotary | None,
    query_scale: QueryScaleForm | None,
) -> bool:
    """True if norm and RoPE of the projections give the queries and keys that attention received."""
    for part, norm, heads in ((outputs[0], norms.q, attended.query), (outputs[1], norms.k, attended.key)):
        if norm is not None and norms.over_all_heads:
            part = apply_norm(part, norm)
        part = part.view(heads.shape)
        if norm is not None and not norms.over_all_heads:
            part = apply_norm(part, norm)
        expected = rotate(part, table)
        if query_scale is not None and heads is attended.query:
            expected = expected * query_scale.at(trace.positions)[:, None, None]
        if not near(heads, expected):
            return False
    return True
