"""Replaces the linear layers of a model by modules that hold weights of any format."""

from collections.abc import Mapping

import torch
from torch import nn

from baton.core.errors import ModelError
from baton.model.linear.linear import Linear
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weights import Weight


class ReorderedLinear(nn.Module):
    """A linear layer whose weight has its columns in another order than the inputs, as GPTQ may choose it."""

    input_order: torch.Tensor

    def __init__(self, inner: Linear, input_order: torch.Tensor) -> None:
        """input_order: int64 [in_features]; column i of the weight multiplies input `input_order[i]`."""
        super().__init__()
        self.inner = inner
        self.register_buffer("input_order", input_order, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x[..., self.input_order])
        return out


def replace_linears(
    model: nn.Module,
    weights: Mapping[str, Weight | PackedWeight],
    input_orders: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Replace the named `nn.Linear` modules of a model. Their biases are kept, and their own weights dropped.

    input_orders: of weights with reordered columns, by name. Raises ModelError if a module is missing, of
    another type, or of another shape.
    """
    for name, weight in weights.items():
        module = model.get_submodule(name)
        require_shape(name, module, weight)
        assert isinstance(module, nn.Linear)
        bias = None if module.bias is None else module.bias.detach()
        linear: nn.Module = Linear(weight, bias)
        order = (input_orders or {}).get(name)
        if order is not None:
            assert isinstance(linear, Linear)
            linear = ReorderedLinear(linear, order)
        model.set_submodule(name, linear)


def require_shape(name: str, module: nn.Module, weight: Weight | PackedWeight) -> None:
    """Raise ModelError unless `weight` has the shape of the linear layer or embedding `module`."""
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ModelError(f"{name} is a {type(module).__name__}; only linear layers and embeddings have weights")
    if weight.shape != tuple(module.weight.shape):
        raise ModelError(
            f"{name} has a weight of {weight.shape[0]} x {weight.shape[1]} in the checkpoint; "
            f"its configuration says {' x '.join(map(str, module.weight.shape))}"
        )
