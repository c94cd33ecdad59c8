"""Runs the experts of a model's own mixture on the native GEMM, whatever their gate is."""

from typing import Any

import torch
from torch import nn

from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.packed_linear import LinearPart, PackedGemm
from baton.model.linear.weights import FloatWeight

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
"""Parameters of a block of experts, 3-D: by expert. Biases have `_bias` after the name."""


def is_experts(module: nn.Module) -> bool:
    """True if a module holds gated experts in two 3-D parameters, as transformers' interface says."""
    names = {_GATE_UP, _DOWN}
    if getattr(module, "has_bias", False):
        names |= {f"{name}_bias" for name in (_GATE_UP, _DOWN)}
    is_gated = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    return bool(is_gated) and names == {name for name, _ in module.named_parameters()}


class NativeExperts:
    """Takes the place of a module's `forward`. The module's own gate runs between the two products."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        """Pack the weights of all experts. `module`: one for which `is_experts` is true."""
        self._module = module
        self._gate_up, self._down = (
            [self._packed(kernels, name, expert) for expert in range(len(getattr(module, name)))]
            for name in (_GATE_UP, _DOWN)
        )

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts.

        x: [tokens, size]; chosen, weights: [tokens, k]. The sum is in float32, in the order of the experts,
        so it does not depend on other tokens.
        """
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            if expert >= len(self._down):  # stands for no expert
                continue
            tokens, place = torch.where(chosen == expert)
            gated = self._module._apply_gate(self._gate_up[expert](x[tokens]))
            out = self._down[expert](gated).float()
            total.index_add_(0, tokens, out * weights[tokens, place, None].float())
        return total.to(x.dtype)

    def release_model_weights(self) -> None:
        """Free the module's own weights; the packed copies stay."""
        for name in (_GATE_UP, _DOWN):
            empty = getattr(self._module, name).new_empty(0)
            setattr(self._module, name, nn.Parameter(empty, requires_grad=False))

    def _packed(self, kernels: Kernels, name: str, expert: int) -> PackedGemm:
        weight: torch.Tensor = getattr(self._module, name)[expert].detach()
        weight = weight.T.contiguous() if self._module.is_transposed else weight
        bias = getattr(self._module, f"{name}_bias")[expert].detach() if self._module.has_bias else None
        return PackedGemm(kernels, LinearPart(FloatWeight(weight), bias))
