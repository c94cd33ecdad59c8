"""Runs the experts of a model's own mixture on the native GEMM, whatever their gate is."""

from typing import Any

import torch

from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.experts import DOWN, GATE_UP, apply_own_gate, expert_linears, release_experts
from baton.model.linear.packed_linear import PackedGemm


class NativeExperts:
    """Takes the place of a module's `forward`. The module's own gate runs between the two products."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        """Pack the weights of all experts. `module`: one for which `is_experts` is true."""
        self._module = module
        self._gate_up, self._down = (
            [PackedGemm(kernels, *expert_linears(module, name, expert)) for expert in range(len(getattr(module, name)))]
            for name in (GATE_UP, DOWN)
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
            gated = apply_own_gate(self._module, self._gate_up[expert](x[tokens]))
            out = self._down[expert](gated).float()
            total.index_add_(0, tokens, out * weights[tokens, place, None].float())
        return total.to(x.dtype)

    def release_model_weights(self) -> None:
        """Free the module's own weights; the packed copies stay."""
        release_experts(self._module)
