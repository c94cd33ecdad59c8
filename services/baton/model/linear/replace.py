"""Replaces the linear layers of a model by modules that hold weights of any format."""

from collections.abc import Mapping

from torch import nn
from transformers.pytorch_utils import Conv1D

from baton.core.errors import ModelError
from baton.model.linear.experts import holds_stacked_experts, unify_experts
from baton.model.linear.linear import Linear
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weights import Weight


def unify_forms(model: nn.Module) -> frozenset[str]:
    """Give linear layers and experts of other forms the usual one, so that everything else knows one form.

    transformers' `Conv1D`, as in GPT-2, becomes an `nn.Linear`; see `unify_experts` for DBRX's experts.
    Parameters without memory stay without. Returns the names of the layers whose plain weights are [inputs,
    outputs] in a checkpoint.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Conv1D) or holds_stacked_experts(module)
    }
    transposed = frozenset(name for name, module in found.items() if isinstance(module, Conv1D))
    while found:
        name, module = found.popitem()  # so that it is freed before the next one is copied
        new = _unify_linear(module) if isinstance(module, Conv1D) else unify_experts(module)
        model.set_submodule(name, new)
    return transposed


def _unify_linear(module: Conv1D) -> nn.Linear:
    linear = nn.Linear(module.nx, module.nf, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


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
