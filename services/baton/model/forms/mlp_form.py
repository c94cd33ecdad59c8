"""Finds the form of a layer's MLP or mixture of experts."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from baton.model.forms.decoder_form import ExpertsForm, FormUnknown, MlpForm
from baton.model.forms.model_trace import ModelTrace, ModuleCall
from baton.model.forms.recognise import activation_of, apply_gate, gate_of, is_linear, near
from baton.model.kernels.layer_values import Gate
from baton.model.linear.experts import DOWN, GATE_UP, are_replaced, expert_linears, is_experts
from baton.model.linear.pack_model import holds_weight

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
    form = Gate(activation_of(module.children()))
    gate, up = torch.cat([call.first_output for call in calls], dim=1).chunk(2, dim=1)
    if not near(trace.of(down).hidden, apply_gate(gate, up, form)):
        raise FormUnknown(f"{type(module).__name__} does not compute {form.activation}(gate) * up")
    if not torch.equal(mlp.first_output, trace.of(down).first_output):
        raise FormUnknown(f"{type(module).__name__} changes the result of {_DOWN}")
    return MlpForm(gate_up=modules, down=down, gate=form)


def _describe_experts(trace: ModelTrace, mlp: ModuleCall, config: Any) -> ExpertsForm:
    module: Any = mlp.module
    name, experts = type(module).__name__, module.experts
    others = [child for child in module.children() if child is not experts and _has_weights(child)]
    if len(others) != 1 or set(dict(others[0].named_parameters())) - {"bias"} != {"weight"}:
        raise FormUnknown(f"{name} has other weights beside its experts and one router")
    if not (is_experts(experts) or are_replaced(experts)):
        found = ", ".join(sorted(key for key, _ in experts.named_parameters()))
        raise FormUnknown(f"the experts of {name} have {found}, not {GATE_UP} and {DOWN} of gated experts")
    router: Any = others[0]
    num_experts = len(router.weight)
    top_k = getattr(config, "num_experts_per_tok", None)
    if not isinstance(top_k, int) or not 0 < top_k <= num_experts:
        raise FormUnknown(f"{name} has no number of experts per token")
    form = ExpertsForm(
        module=module,
        router=router.weight,
        router_bias=getattr(router, "bias", None),
        experts=experts,
        top_k=top_k,
        normalised=True,
        gate=gate_of(experts),
    )
    softmax, chosen = _route(form, mlp.hidden)
    outputs = _run_experts(form, mlp.hidden, chosen)
    # What the configuration says is tried first: the sum of the chosen experts' weights may be almost one.
    named = bool(getattr(config, "norm_topk_prob", True))
    for normalised in (named, not named):
        weights = softmax / softmax.sum(dim=-1, keepdim=True) if normalised else softmax
        if near(mlp.first_output[:_COMPARED_ROWS], (weights[:, :, None] * outputs).sum(dim=1)):
            return replace(form, normalised=normalised)
    raise FormUnknown(f"{name} routes tokens in another way than a softmax of its {top_k} largest logits")


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(holds_weight(each) for each in module.modules())


def _route(form: ExpertsForm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (softmax over all experts of the chosen ones, the chosen ones) of the first rows, [rows, top_k].

    The logits are computed from all rows, as the model does, so that rounding chooses the same experts.
    """
    logits = nn.functional.linear(x, form.router, form.router_bias).float()
    weights, chosen = logits.softmax(dim=-1).topk(form.top_k, dim=-1)
    return weights[:_COMPARED_ROWS], chosen[:_COMPARED_ROWS]


def _run_experts(form: ExpertsForm, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows, top_k, size]: the outputs of the chosen experts for the first rows of x."""
    out = torch.empty(*chosen.shape, x.shape[1])
    for row, k in np.ndindex(*chosen.shape):
        expert = int(chosen[row, k])
        gate, up = _multiply(form, GATE_UP, expert, x[row][None]).chunk(2, dim=1)
        out[row, k] = _multiply(form, DOWN, expert, apply_gate(gate, up, form.gate).to(x.dtype))[0]
    return out


def _multiply(form: ExpertsForm, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([linear(x) for linear in expert_linears(form.experts, name, expert)], dim=1)
