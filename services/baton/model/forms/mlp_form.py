"""Finds the form of a layer's MLP or mixture of experts."""

from typing import Any

import torch
from torch import nn

from baton.model.forms.decoder_form import ACTIVATIONS, ExpertsForm, FormUnknown, MlpForm
from baton.model.forms.model_trace import ModelTrace, ModuleCall
from baton.model.forms.recognise import activation_of, is_linear, near

_JOINED, _SEPARATE = ("gate_up_proj",), ("gate_proj", "up_proj")
_DOWN = "down_proj"
_EXPERTS = "experts"
_COMPARED_ROWS = 2
"""Tokens whose experts are computed once more. Each has experts of its own, and large ones take long."""


def describe_mlp(trace: ModelTrace, mlp: ModuleCall, config: Any) -> MlpForm | ExpertsForm:
    """Return the form of an MLP. Raises FormUnknown if it is neither a gated MLP nor experts of such."""
    if isinstance(getattr(mlp.module, _EXPERTS, None), nn.Module):
        return _describe_experts(trace, mlp, config)
    module = mlp.module
    names = next((names for names in (_JOINED, _SEPARATE) if all(hasattr(module, name) for name in names)), None)
    if names is None or not is_linear(getattr(module, _DOWN, None)):
        raise FormUnknown(f"{type(module).__name__} is not a gated MLP: it has no gate, up and {_DOWN}")
    modules, down = tuple(getattr(module, name) for name in names), getattr(module, _DOWN)
    if not all(is_linear(each) for each in modules):
        raise FormUnknown(f"{type(module).__name__} has other than plain linear modules")
    calls = [trace.of(each) for each in modules]
    if not all(torch.equal(call.hidden, mlp.hidden) for call in calls):
        raise FormUnknown(f"{type(module).__name__} changes its input before the projections")
    activation = activation_of(module.children())
    gate, up = torch.cat([call.first_output for call in calls], dim=1).float().chunk(2, dim=1)
    if not near(trace.of(down).hidden, ACTIVATIONS[activation](gate) * up):
        raise FormUnknown(f"{type(module).__name__} does not compute {activation}(gate) * up")
    if not torch.equal(mlp.first_output, trace.of(down).first_output):
        raise FormUnknown(f"{type(module).__name__} changes the result of {_DOWN}")
    return MlpForm(gate_up=modules, down=down, activation=activation)


def _describe_experts(trace: ModelTrace, mlp: ModuleCall, config: Any) -> ExpertsForm:
    module: Any = mlp.module
    name, experts = type(module).__name__, module.experts
    others = [child for child in module.children() if child is not experts and any(True for _ in child.parameters())]
    weights = dict(experts.named_parameters())
    if len(others) != 1 or set(dict(others[0].named_parameters())) != {"weight"}:
        raise FormUnknown(f"{name} has other weights beside its experts and one router")
    if set(weights) != {"gate_up_proj", "down_proj"}:
        raise FormUnknown(f"the experts of {name} have {', '.join(sorted(weights))}, not gate_up_proj and down_proj")
    router: Any = others[0].weight
    num_experts, size = router.shape
    down = weights["down_proj"]
    if tuple(down.shape[:2]) != (num_experts, size) or tuple(weights["gate_up_proj"].shape) != (
        num_experts,
        2 * down.shape[2],
        size,
    ):
        raise FormUnknown(f"the experts of {name} are not stored as outputs by inputs")
    activation = activation_of(experts.children())
    top_k = getattr(config, "num_experts_per_tok", None)
    if not isinstance(top_k, int) or not 0 < top_k <= num_experts:
        raise FormUnknown(f"{name} has no number of experts per token")
    for normalised in (True, False):
        form = ExpertsForm(
            module=module,
            router=router,
            experts=experts,
            top_k=top_k,
            normalised=normalised,
            activation=activation,
        )
        if near(mlp.first_output[:_COMPARED_ROWS], _run_experts(form, mlp.hidden)):
            return form
    raise FormUnknown(f"{name} routes tokens in another way than a softmax of its {top_k} largest logits")


def _run_experts(form: ExpertsForm, x: torch.Tensor) -> torch.Tensor:
    """Return the mixture of the first rows of x [num_tokens, size], in float32 but for the router's logits.

    The logits are computed from all rows, as the model does, so that rounding chooses the same experts.
    """
    experts: Any = form.experts
    logits = nn.functional.linear(x, form.router).float()
    weights, chosen = logits.softmax(dim=-1).topk(form.top_k, dim=-1)
    if form.normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x[:_COMPARED_ROWS], dtype=torch.float32)
    for row in range(len(out)):
        for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
            gate, up = (experts.gate_up_proj[expert].float() @ x[row].float()).chunk(2)
            out[row] += weight * (experts.down_proj[expert].float() @ (ACTIVATIONS[form.activation](gate) * up))
    return out
