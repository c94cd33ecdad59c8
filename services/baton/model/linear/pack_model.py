"""Packs the linear layers of a loaded model, one matrix at a time. Its own code then multiplies natively."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from baton.model.linear.embedding import WeightEmbedding
from baton.model.linear.experts import (
    DOWN,
    GATE_UP,
    ExpertWeights,
    are_replaced,
    bias_name,
    expert_linears,
    is_experts,
    is_router,
    replace_experts,
)
from baton.model.linear.linear import Linear
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.packer import WeightPacker
from baton.model.linear.weights import CodedWeight, FloatWeight, Weight
from baton.runtime.logging import get_logger

log = get_logger(__name__)


def pack_model(model: nn.Module, packer: WeightPacker) -> None:
    """Replace each linear layer, and each expert, whose product is native by a `Linear` with a packed weight.

    The unpacked weight, or block of experts, is freed before the next one is packed. A weight that several
    modules share is packed once, and an embedding among them reads its rows from there. Without memory the
    rest stays as it is, which is logged.
    """
    try:
        _pack_all(model, packer)
    except OSError as error:
        hint = "the linear layers that are not packed are computed by slower products"
        log.warning("weights_not_packed", problem=str(error), hint=hint)


def _pack_all(model: nn.Module, packer: WeightPacker) -> None:
    modules = dict(model.named_modules())
    packer.is_mixed |= any(holds_weight(module) for module in modules.values())
    sharers = _sharers(modules, packer.dtype)
    while sharers:
        names = sharers.pop()
        owners = [modules.pop(name) for name in names]
        if not all(isinstance(owner, nn.Embedding) for owner in owners):
            _pack_shared(model, names, owners, packer)
    for name, module in modules.items():
        if is_experts(module):
            _pack_experts(name, module, packer)


def _pack_experts(name: str, module: Any, packer: WeightPacker) -> None:
    """Pack the experts of a block, in place of its parameters, if their product is native.

    Parameters of another dtype than the activations' stay, as those of linear layers do.
    """
    if any(parameter.dtype != packer.dtype for parameter in module.parameters(recurse=False)):
        return
    packed: list[ExpertWeights[Weight | PackedWeight]] = []
    for expert in range(len(module.get_parameter(DOWN))):
        gate_up, down = (_pack_product(name, module, own, expert, packer) for own in (GATE_UP, DOWN))
        if gate_up is None or down is None:
            return
        packed.append(ExpertWeights([gate_up], down))
    names = (GATE_UP, DOWN) if module.has_bias else ()
    biases = {own: module.get_parameter(bias_name(own)).detach() for own in names}
    replace_experts(module, packed, biases or None)


def _pack_product(name: str, module: Any, own: str, expert: int, packer: WeightPacker) -> PackedWeight | None:
    (linear,) = expert_linears(module, own, expert)
    assert not isinstance(linear.weight, PackedWeight)
    return packer.pack(f"{name}.{own}", linear.weight)


def _sharers(modules: Mapping[str, nn.Module], dtype: torch.dtype) -> list[list[str]]:
    """Return the names of the modules of each weight to be packed."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, module in modules.items():
        weight = _unpacked_weight(module, dtype)
        if weight is not None and not is_router(name, modules):
            found.setdefault(_identity(weight), []).append(name)
    return list(found.values())


def holds_weight(module: object) -> bool:
    """True for a linear layer that holds a `Weight`, packed or not, in the place of a parameter."""
    is_product = all(hasattr(module, name) for name in ("in_features", "out_features", "bias"))
    return is_product and _held_weight(module) is not None


def rounds_activations(model: nn.Module) -> bool:
    """True if a linear layer has packed codes, whose product rounds activations to 8 bits."""
    weights = [_held_weight(module) for module in model.modules()]
    return any(isinstance(weight, PackedWeight) and weight.is_coded for weight in weights)


def unknown_matrices(model: nn.Module) -> dict[str, float]:
    """Return the share of a model's weights in modules that no product here can compute, by class.

    These are neither linear layers nor embeddings nor gated experts. The model's own code multiplies them.
    """
    sizes: Counter[str] = Counter()
    held = {
        id(weight): prod(weight.shape) for module in model.modules() if (weight := _held_weight(module)) is not None
    }
    total = sum(held.values()) + sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Embedding) and not is_experts(module) and not are_replaced(module):
            own = module.parameters(recurse=False)
            sizes[type(module).__name__] += sum(each.numel() for each in own if each.dim() > 1)
    return {name: size / total for name, size in sizes.items() if size}


def _held_weight(module: object) -> Weight | PackedWeight | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, FloatWeight | CodedWeight | PackedWeight) else None


def _pack_shared(model: nn.Module, names: list[str], owners: list[nn.Module], packer: WeightPacker) -> None:
    """Pack a weight, and replace the modules that share it."""
    weight = _unpacked_weight(owners[0], packer.dtype)
    packed = None if weight is None else packer.pack(names[0], weight)
    if packed is None:
        return
    for name, owner in zip(names, owners, strict=True):
        if isinstance(owner, WeightEmbedding | nn.Embedding):
            original = owner.original if isinstance(owner, WeightEmbedding) else owner
            model.set_submodule(name, WeightEmbedding(packed, original, packer.dtype))
        else:
            bias = getattr(owner, "bias", None)
            model.set_submodule(name, Linear(packed, None if bias is None else bias.detach()))


def _unpacked_weight(module: nn.Module, dtype: torch.dtype) -> Weight | None:
    """Return the weight of a linear layer or an embedding; None for other modules, and if it is packed.

    Parameters of another dtype than the activations' belong to code that converts its inputs.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, FloatWeight | CodedWeight):
        return weight
    is_parameter = type(module) is nn.Linear or isinstance(module, nn.Embedding)
    if is_parameter and isinstance(weight, nn.Parameter) and weight.dtype == dtype and weight.numel():
        return FloatWeight(weight.data)
    return None


def _identity(weight: Weight) -> tuple[int, int]:
    values = weight.values if isinstance(weight, FloatWeight) else weight.codes
    return values.data_ptr(), values.numel()
