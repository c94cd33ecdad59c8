"""Recognises single modules by what they compute: RMS norms, activations, linear products, rotary embeddings.

A module is called with numbers in float32 and compared with each known form, so neither its class nor its
configuration matters.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from baton.model.forms.decoder_form import ACTIVATIONS, FormUnknown, RotaryForm
from baton.model.kernels.layer_values import Gate, RmsNorm, Rotary
from baton.model.linear.experts import apply_own_gate
from baton.model.linear.pack_model import holds_weight

_FLOAT32_ERROR = 1e-5
"""Relative difference that rounding in float32 may cause."""
_ROUNDINGS = 8
"""Roundings to the model's dtype between two results that are compared."""


def near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if both are equal except for rounding to `actual`'s dtype."""
    if actual.shape != expected.shape:
        return False
    size = float(expected.abs().max()) if expected.numel() else 0.0
    limit = max(_FLOAT32_ERROR, _ROUNDINGS * torch.finfo(actual.dtype).eps / 2) * size
    return bool(((actual.float() - expected.float()).abs() <= limit).all())


def is_linear(module: object) -> bool:
    """True for `nn.Linear` itself, and for a linear layer that holds a `Weight`. An adapted layer has another
    type."""
    return type(module) is nn.Linear or holds_weight(module)


def as_rms_norm(module: nn.Module) -> RmsNorm | None:
    """Return the norm that a module computes, or None if it is no RMS norm with a weight for each element."""
    parameters = dict(module.named_parameters())
    eps = next((value for name in ("variance_epsilon", "eps") if (value := getattr(module, name, None))), None)
    if set(parameters) != {"weight"} or eps is None or parameters["weight"].dim() != 1:
        return None
    weight = parameters["weight"].detach().float()
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[1.0], [1e-3], [30.0]])  # in the second row, eps matters
    x = (torch.randn(3, weight.numel(), generator=generator) * scales).to(weight.device)
    found = _call(module, x)
    normed = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + float(eps))
    for factor in (weight, 1.0 + weight):
        if found is not None and torch.allclose(found.float(), normed * factor, rtol=1e-4, atol=1e-5):
            return RmsNorm(factor.contiguous(), float(eps))
    return None


def activation_of(modules: Iterable[nn.Module]) -> str:
    """Return the name of the only activation among the modules.

    Raises FormUnknown if there is none of `ACTIVATIONS`.
    """
    x = torch.linspace(-8, 8, 257)
    candidates = [
        module
        for module in modules
        if not is_linear(module) and not any(True for _ in chain(module.parameters(), module.buffers()))
    ]
    for module in candidates:
        found = _call(module, x)
        for name, function in ACTIVATIONS.items():
            if found is not None and torch.allclose(found.float(), function(x), rtol=1e-5, atol=1e-6):
                return name
    named = ", ".join(type(module).__name__ for module in candidates) or "none"
    raise FormUnknown(f"its activation ({named}) is not one of {', '.join(ACTIVATIONS)}")


def gate_of(experts: Any) -> Gate:
    """Return the gate of a block of experts, see `linear/experts.py`.

    Raises FormUnknown if it is none of `ACTIVATIONS` with limits.
    """
    halves = 12.0 * torch.randn(16, 64, generator=torch.Generator().manual_seed(0))  # limits of 7 matter
    found = _call_gate(experts, halves)
    gate, up = halves.chunk(2, dim=1)
    limits = [getattr(experts, name, None) for name in ("limit", "swiglu_limit")]
    alphas = [getattr(experts, name, None) for name in ("alpha", "swiglu_alpha")]
    for form in (
        Gate(activation, alpha=alpha, limit=limit, up_shift=shift)
        for limit in (math.inf, *(float(each) for each in limits if each is not None))
        for alpha in (1.0, *(float(each) for each in alphas if each is not None))
        for shift in (0.0, 1.0)
        for activation in ACTIVATIONS
    ):
        if found is not None and torch.allclose(found.float(), apply_gate(gate, up, form), rtol=1e-5, atol=1e-5):
            return form
    raise FormUnknown(f"the gate of {type(experts).__name__} is not one of {', '.join(ACTIVATIONS)}, with limits")


def apply_gate(gate: torch.Tensor, up: torch.Tensor, form: Gate) -> torch.Tensor:
    """Return the halves of an MLP's first product, joined, in float32."""
    gate, up = gate.float().clamp(max=form.limit), up.float().clamp(-form.limit, form.limit)
    if form.activation == "silu" and form.alpha != 1.0:
        return gate * torch.sigmoid(form.alpha * gate) * (up + form.up_shift)
    return ACTIVATIONS[form.activation](gate) * (up + form.up_shift)


def rotary_form(rotary: nn.Module, scaling: float, frequencies: torch.Tensor) -> RotaryForm:
    """Return a rotary embedding with the given attributes of a module."""
    if frequencies.dim() != 1 or not isinstance(scaling, (int, float)):
        raise FormUnknown(f"{type(rotary).__name__} has no single list of frequencies")
    return RotaryForm(frequencies.float().contiguous(), float(scaling))


def rotary_candidates(rotary: nn.Module) -> list[RotaryForm]:
    """Return every rotary embedding that a module holds.

    transformers names them `inv_freq` and `attention_scaling`, with the layer type before if layers differ.
    """
    found = []
    for module in rotary.modules():
        for name, buffer in module.named_buffers(recurse=False):
            prefix, is_frequencies, _ = name.partition("inv_freq")
            if is_frequencies and not prefix.endswith("original_"):
                found.append(rotary_form(module, getattr(module, f"{prefix}attention_scaling", 1.0), buffer))
    return found


def table_of(position_embeddings: Any) -> Rotary:
    """Return cosine and sine, each [num_tokens, half], as a layer received them.

    Raises FormUnknown if they are not two tables with frequencies in order, once or twice.
    """
    if not isinstance(position_embeddings, Sequence) or len(position_embeddings) != 2:
        raise FormUnknown("its layers do not receive cosine and sine")
    cosine, sine = (table[0] if table.dim() == 3 else table for table in position_embeddings)
    if cosine.dim() != 2 or cosine.shape != sine.shape:
        raise FormUnknown(f"its rotary embedding has tables of shape {tuple(cosine.shape)}")
    return Rotary(cosine, sine)


def is_table_of(form: RotaryForm, table: Rotary, positions: torch.Tensor) -> bool:
    """True if a form has this table, whether frequencies occur in it once or twice."""
    expected = form.at(positions)
    return any(
        near(table.cosine, torch.cat([expected.cosine] * times, dim=1))
        and near(table.sine, torch.cat([expected.sine] * times, dim=1))
        for times in (1, 2)
    )


def rotate(heads: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Return heads [num_tokens, num_heads, head_dim] in float32 after RoPE."""
    heads = heads.float()
    if rotary is None:
        return heads
    half = rotary.cosine.shape[1]
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cosine, sine = rotary.cosine[:, None], rotary.sine[:, None]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], dim=-1)


def apply_norm(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """Return the norm over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + norm.eps) * norm.factor


def _call_gate(experts: Any, halves: torch.Tensor) -> torch.Tensor | None:
    """Return a gate's result, or None if it does not take numbers of any size."""
    try:
        return apply_own_gate(experts, halves)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None


def _call(module: Callable[..., Any], x: torch.Tensor) -> torch.Tensor | None:
    """Return a module's result, or None if it does not take a tensor and return one of its shape."""
    try:
        found = module(x)
    except (RuntimeError, TypeError, ValueError):
        return None
    return found if isinstance(found, torch.Tensor) and found.shape == x.shape else None
