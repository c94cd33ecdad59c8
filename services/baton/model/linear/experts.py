"""Runs the experts of a mixture-of-experts block on weights in any format, one `Linear` an expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from baton.core.errors import ModelError
from baton.model.linear.linear import Linear
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weights import Weight

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Parameters of a block of experts, 3-D: by expert."""


def is_experts(module: nn.Module) -> bool:
    """True if a module holds gated experts in two 3-D parameters, as transformers' interface says."""
    shapes = [getattr(getattr(module, name, None), "shape", ()) for name in (GATE_UP, DOWN)]
    is_gated = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    return is_gated and all(len(shape) == 3 for shape in shapes)


class JoinedLinear(nn.Module):
    """Several linear layers of the same input, outputs concatenated. Their formats may differ."""

    def __init__(self, weights: Sequence[Weight | PackedWeight]) -> None:
        """weights: each [outputs, inputs]."""
        super().__init__()
        self.parts = nn.ModuleList(Linear(weight) for weight in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Weights of one expert, [outputs, inputs]. gate_up: its parts, whose outputs are concatenated.

    The outputs must be in the order in which the block's own code splits gate and up.
    """

    gate_up: Sequence[Weight | PackedWeight]
    down: Weight | PackedWeight


def replace_experts(module: Any, experts: Sequence[ExpertWeights]) -> None:
    """Replace the parameters of a block by the weights of its experts. Its biases stay as they are.

    Raises ModelError if shapes or numbers differ.
    """
    for name, parts in ((GATE_UP, [each.gate_up for each in experts]), (DOWN, [[each.down] for each in experts])):
        number, *shape = getattr(module, name).shape
        wanted = tuple(reversed(shape)) if module.is_transposed else tuple(shape)
        got = {(sum(weight.shape[0] for weight in own), *{weight.shape[1] for weight in own}) for own in parts}
        if len(parts) != number or got != {wanted}:
            raise ModelError(f"{name} has {len(parts)} experts of shapes {sorted(got)}; must be {number} of {wanted}")
        delattr(module, name)
        linears = [Linear(own[0]) if len(own) == 1 else JoinedLinear(own) for own in parts]
        setattr(module, name, nn.ModuleList(linears))
    module.forward = MethodType(forward_experts, module)


def forward_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, in the dtype of `hidden_states`.

    hidden_states [tokens, hidden]; top_k_index and top_k_weights [tokens, k]. The sum is in float32, in the
    order of the experts, so it does not depend on other tokens.
    """
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for expert in top_k_index.unique().tolist():
        tokens, place = torch.where(top_k_index == expert)
        gate_up = getattr(module, GATE_UP)[expert](hidden_states[tokens])
        if module.has_bias:
            gate_up = gate_up + getattr(module, f"{GATE_UP}_bias")[expert]
        out = getattr(module, DOWN)[expert](module._apply_gate(gate_up))
        if module.has_bias:
            out = out + getattr(module, f"{DOWN}_bias")[expert]
        total.index_add_(0, tokens, out.float() * top_k_weights[tokens, place, None].float())
    return total.to(hidden_states.dtype)
