"""Runs the experts of a mixture-of-experts block on weights in any format, one linear layer an expert.

transformers' interface for experts says how a block stores them: 3-D parameters by expert, transposed or not,
with the outputs of gate and up one after the other or in turns. Here the outputs of gate always come first.
DBRX's code does not use the interface; `unify_experts` gives its blocks that form.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from baton.core.errors import ModelError
from baton.model.linear.linear import Linear
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import FloatWeight, Weight

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Parameters of a block of experts, 3-D: by expert. Biases, 2-D, have `_bias` after the name."""

STACKED = ("mlp.w1", "mlp.v1", "mlp.w2")
"""Parameters of a block of DBRX: gate, up and transposed down, those of all experts one below the other."""


class GatedExperts(nn.Module):
    """Gated experts as transformers' interface has them, for a model whose own code holds them otherwise."""

    has_gate = is_concatenated = True
    has_bias = is_transposed = has_post_expert_norm = False

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """gate_up: [experts, outputs of gate, then up, hidden]. down: [experts, hidden, size]."""
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(each, requires_grad=False) for each in (gate_up, down))
        self._activation = activation

    def _apply_gate(self, halves: torch.Tensor) -> torch.Tensor:
        gate, up = halves.chunk(2, dim=-1)
        return self._activation(gate) * up

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return forward_experts(self, hidden_states, top_k_index, top_k_weights)


def holds_stacked_experts(module: nn.Module) -> bool:
    """True for a block of experts as DBRX's code has it."""
    return {name for name, _ in module.named_parameters()} == set(STACKED)


def unify_experts(module: Any) -> GatedExperts:
    """Return a block of DBRX in the form of transformers' interface; without memory if it has none."""
    parts = [module.get_parameter(name).detach().unflatten(0, (module.num_experts, -1)) for name in STACKED]
    return GatedExperts(torch.cat(parts[:2], dim=1), parts[2].transpose(1, 2).contiguous(), module.mlp.activation_fn)


def is_experts(module: nn.Module) -> bool:
    """True if a module holds gated experts in two 3-D parameters, as transformers' interface says."""
    names = {GATE_UP, DOWN}
    if getattr(module, "has_bias", False):
        names |= {bias_name(name) for name in (GATE_UP, DOWN)}
    parameters = dict(module.named_parameters(recurse=False))  # a norm of the outputs has its own
    is_gated = getattr(module, "has_gate", False) and parameters.keys() == names
    return bool(is_gated) and all(parameters[name].dim() == 3 for name in (GATE_UP, DOWN))


def is_router(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """True for the plain linear layer that chooses among experts; it is small, and its errors are not.

    It lies beside the experts, with at most an output for each, or has an output for each in a module beside
    them. modules: of the model.
    """
    module = modules[name]
    if type(module) is not nn.Linear:
        return False
    parent = name.rpartition(".")[0]
    experts = _experts_of(modules.get(parent))
    if experts is not None:
        number = _num_experts(experts)
        return number is None or module.out_features <= number
    experts = _experts_of(modules.get(parent.rpartition(".")[0]))
    return experts is not None and _num_experts(experts) == module.out_features


def _experts_of(block: nn.Module | None) -> nn.Module | None:
    experts = getattr(block, "experts", None)
    return experts if isinstance(experts, nn.Module) else None


def _num_experts(experts: nn.Module) -> int | None:
    held = experts if isinstance(experts, nn.ModuleList) else getattr(experts, DOWN, None)
    return len(held) if isinstance(held, nn.ModuleList | nn.Parameter) else None


def are_replaced(module: nn.Module) -> bool:
    """True if `replace_experts` has given a block its weights."""
    return isinstance(getattr(module, GATE_UP, None), nn.ModuleList)


def bias_name(name: str) -> str:
    """Return the name of the biases of a parameter."""
    return f"{name}_bias"


class JoinedLinear(nn.Module):
    """Several linear layers of the same input, outputs concatenated. Their formats may differ."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


AnyWeight = TypeVar("AnyWeight", bound=Weight | PackedWeight, covariant=True)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights(Generic[AnyWeight]):
    """Weights of one expert, [outputs, inputs].

    gate_up: gate and up, or one weight of both; as checkpoints have it, in the order of the block's own
    parameter.
    """

    gate_up: Sequence[AnyWeight]
    down: AnyWeight


def gate_first(module: Any, expert: ExpertWeights[Weight]) -> ExpertWeights[Weight]:
    """Return the weights of an expert with the outputs of gate before those of up."""
    order = _halves(module, GATE_UP)
    if order is None or len(expert.gate_up) > 1:
        return expert
    return ExpertWeights([take_rows(expert.gate_up[0], order)], expert.down)


def replace_experts(
    module: Any,
    experts: Sequence[ExpertWeights[Weight | PackedWeight]],
    biases: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Replace the parameters of a block, biases included, by linear layers of its experts.

    experts: as `gate_first` returns them. biases: [experts, outputs] by the name of the parameter, in the
    block's own order; None if it has none. Raises ModelError if shapes or numbers differ.
    """
    for name, parts in ((GATE_UP, [each.gate_up for each in experts]), (DOWN, [[each.down] for each in experts])):
        number, *shape = getattr(module, name).shape
        wanted = tuple(reversed(shape)) if module.is_transposed else tuple(shape)
        got = {(sum(weight.shape[0] for weight in own), *{weight.shape[1] for weight in own}) for own in parts}
        if len(parts) != number or got != {wanted}:
            raise ModelError(f"{name} has {len(parts)} experts of shapes {sorted(got)}; must be {number} of {wanted}")
        order = _halves(module, name)
        delattr(module, name)
        own_biases: Sequence[torch.Tensor | None] = [None] * number
        if biases is not None:
            delattr(module, bias_name(name))
            own_biases = list(biases[name] if order is None else biases[name][:, order])
        linears = [_joined(own, bias) for own, bias in zip(parts, own_biases, strict=True)]
        setattr(module, name, nn.ModuleList(linears))
    module.forward = MethodType(forward_experts, module)


def _joined(weights: Sequence[Weight | PackedWeight], bias: torch.Tensor | None) -> nn.Module:
    sizes = [weight.shape[0] for weight in weights]
    biases = [None] * len(sizes) if bias is None else [part.contiguous() for part in bias.split(sizes)]
    linears = [Linear(weight, own) for weight, own in zip(weights, biases, strict=True)]
    return linears[0] if len(linears) == 1 else JoinedLinear(linears)


def expert_linears(module: Any, name: str, expert: int) -> list[Linear]:
    """Return the linear layers of a product of one expert, whose outputs are to be concatenated.

    name: GATE_UP, of which the outputs of gate come first, or DOWN. Layers of a block's own parameters share
    their memory if their layout allows it.
    """
    held = getattr(module, name)
    if isinstance(held, nn.ModuleList):
        own = held[expert]
        return cast(list[Linear], list(own.parts)) if isinstance(own, JoinedLinear) else [cast(Linear, own)]
    values = held[expert].detach()
    values = values.T.contiguous() if module.is_transposed else values
    bias = getattr(module, bias_name(name))[expert].detach() if module.has_bias else None
    order = _halves(module, name)
    if order is not None:
        values, bias = values[order], None if bias is None else bias[order]
    return [Linear(FloatWeight(values), bias)]


def as_matrices(module: Any, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a 3-D tensor of a checkpoint as [experts, outputs, inputs].

    Some checkpoints have the parameter in the block's own layout, others, such as Qwen3-VL-MoE's, transposed.
    """
    own = getattr(module, name).shape
    is_own = values.shape == own or values.transpose(1, 2).shape != own
    return values.transpose(1, 2) if is_own == module.is_transposed else values


def release_experts(module: Any) -> None:
    """Free the weights of a block's experts, which a backend holds packed. Its own code then raises.

    Weights that were packed before stay, because the backend shares them.
    """
    for name in (GATE_UP, DOWN):
        held = getattr(module, name)
        if isinstance(held, nn.ModuleList):
            if not all(each.is_packed for each in held.modules() if isinstance(each, Linear)):
                setattr(module, name, nn.ModuleList())
        else:
            setattr(module, name, nn.Parameter(held.new_empty(0), requires_grad=False))


def apply_own_gate(module: Any, halves: torch.Tensor) -> torch.Tensor:
    """Return [tokens, size]: what a block's own gate makes of `halves`, the outputs of gate, then up."""
    gated: torch.Tensor = module._apply_gate(in_own_order(module, halves))
    return gated


def in_own_order(module: Any, halves: torch.Tensor) -> torch.Tensor:
    """Return numbers [..., gate, then up] in the order in which the block's own code splits them."""
    if module.is_concatenated:
        return halves
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)


def _halves(module: Any, name: str) -> torch.Tensor | None:
    """Return the outputs of a parameter in the order of gate, then up; None if they are in it."""
    if name != GATE_UP or module.is_concatenated:
        return None
    shape = getattr(module, name).shape
    return torch.arange(shape[2 if module.is_transposed else 1]).view(-1, 2).T.reshape(-1)


def forward_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, in the dtype of `hidden_states`.

    hidden_states [..., hidden], of tokens; top_k_index and top_k_weights [tokens, k]. The sum is in float32,
    in the order of the experts, so it does not depend on other tokens.
    """
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in top_k_index.unique().tolist():
        if expert >= len(getattr(module, DOWN)):  # stands for no expert
            continue
        tokens, place = torch.where(top_k_index == expert)
        gated = apply_own_gate(module, _multiply(module, GATE_UP, expert, x[tokens]))
        out = _multiply(module, DOWN, expert, gated)
        if module.has_post_expert_norm:
            out = module.post_expert_norm(out)
        total.index_add_(0, tokens, out.float() * top_k_weights[tokens, place, None].float())
    return total.to(hidden_states.dtype).view(hidden_states.shape)


def _multiply(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    held = getattr(module, name)[expert]
    product: torch.Tensor = held(x) if isinstance(held, nn.Module) else nn.functional.linear(x, held)
    return product
