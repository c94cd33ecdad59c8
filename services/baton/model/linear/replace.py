"""Replaces the linear layers of a model by modules that hold weights of any format."""

from collections.abc import Mapping

from torch import nn
from transformers.pytorch_utils import Conv1D

from baton.core.errors import ModelError
from baton.model.linear.linear import Linear
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weights import Weight


def unify_linears(model: nn.Module) -> frozenset[str]:
    """Replace each linear layer of another form by an `nn.Linear`, so that everything else knows one form.

    The other form is transformers' `Conv1D`, as in GPT-2. Layers without memory stay without.
    Returns the names of the layers whose plain weights are [inputs, outputs] in a checkpoint.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    names = frozenset(found)
    while found:
        name, module = found.popitem()  # so that its weight is freed before the next one is transposed
        linear = nn.Linear(module.nx, module.nf, device="meta")
        linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
        linear.bias = module.bias
        model.set_submodule(name, linear)
    return names


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
