"""Replaces the linear layers of a model by modules that hold weights of any format."""

from collections.abc import Mapping

from torch import nn

from baton.core.errors import ModelError
from baton.model.linear.linear import Linear
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weights import Weight


def replace_linears(
    model: nn.Module,
    weights: Mapping[str, Weight | PackedWeight],
) -> None:
    """Replace the named `nn.Linear` modules of a model. Their biases are kept, and their own weights dropped.

    Raises ModelError if a module is missing, of another type, or of another shape.
    """
    for name, weight in weights.items():
        module = model.get_submodule(name)
        require_shape(name, module, weight)
        assert isinstance(module, nn.Linear)
        bias = None if module.bias is None else module.bias.detach()
        model.set_submodule(name, Linear(weight, bias))


def require_shape(name: str, module: nn.Module, weight: Weight | PackedWeight) -> None:
    """Raise ModelError unless `weight` has the shape of the linear layer or embedding `module`."""
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ModelError(f"{name} is a {type(module).__name__}; only linear layers and embeddings have weights")
    if weight.shape != tuple(module.weight.shape):
        raise ModelError(
            f"{name} has a weight of {weight.shape[0]} x {weight.shape[1]} in the checkpoint; "
            f"its configuration says {' x '.join(map(str, module.weight.shape))}"
        )
