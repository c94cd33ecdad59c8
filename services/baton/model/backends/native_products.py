"""Runs the model's own code, of any architecture, with the native GEMM.

Linear layers and experts are packed before, see `pack_model`. Layers that are not, such as routers, are
packed here.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.packed_linear import PackedGemm
from baton.model.step.forward import ModelForward


class ProductsForward(ModelForward):
    """Implements `Forward`. The native products are active only during `compute`, so that verification can
    run the original."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels) -> None:
        """Pack the weights that are left. `kernels`: with the number of threads of a step."""
        self._products: list[tuple[dict[str, Any], PackedGemm]] = [
            (vars(module), PackedGemm(kernels, module)) for module in model.modules() if type(module) is nn.Linear
        ]
        super().__init__(model)

    def compute(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, sample_rows: torch.Tensor, attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model, see `ModelForward.compute`."""
        for module, product in self._products:
            module["forward"] = product
        try:
            return super().compute(token_ids, position_ids, sample_rows, attention)
        finally:
            for module, _ in self._products:
                del module["forward"]

    def release_model_weights(self) -> None:
        """Free the weights that are packed here; the model's own code then raises outside of steps."""
        for _, product in self._products:
            product.release_model_weights()
