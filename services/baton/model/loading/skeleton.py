"""Builds a model without weights, and gives it those of a checkpoint, one module at a time."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from baton.core.errors import ModelError
from baton.model.linear.embedding import WeightEmbedding
from baton.model.linear.experts import (
    DOWN,
    GATE_UP,
    ExpertWeights,
    as_matrices,
    bias_name,
    gate_first,
    in_own_order,
    is_experts,
    is_router,
    replace_experts,
)
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.packer import WeightPacker
from baton.model.linear.replace import replace_linears, require_shape
from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import FloatWeight, Weight
from baton.model.loading.weight_source import WeightSource

DEQUANTISED_BYTES = 256 << 20
"""Host memory that dequantising a weight takes, whatever its size."""
_BYTES_WHILE_DEQUANTISED = 20
"""Bytes of a number while it is dequantised: four float32 arrays and the result."""

_PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Coder = Callable[[str, torch.Tensor], Weight]
"""Returns the coded weight of a linear layer, from its name and its plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPolicy:
    """Form that a model's weights get.

    dtype: of everything that is not coded. device: where it is. keeps_codes: coded weights stay coded; else
    they are dequantised to `dtype`. coder: codes the plain weights of linear layers; None leaves them.
    packer: packs each coded weight at once, so that its codes are freed before the next weight is read; None
    leaves them.
    """

    dtype: torch.dtype
    device: torch.device
    keeps_codes: bool
    coder: Coder | None = None
    packer: WeightPacker | None = None

    def coded(self, name: str, weight: Weight) -> Weight:
        """Return the weight of a linear layer, coded if it is plain. Takes no float32 copy of all of it."""
        if self.coder is not None and isinstance(weight, FloatWeight) and is_plain(weight):
            return self.coder(name, weight.values)
        return weight

    def packed(self, name: str, weight: Weight) -> Weight | PackedWeight:
        """Return the weight of a module in the form in which it is kept."""
        return (None if self.packer is None else self.packer.pack(name, weight)) or weight


@dataclass(slots=True)
class AssignedWeights:
    """Counts of modules and experts, and the tensors for which the model has no place."""

    num_coded: int = 0
    num_dequantised: int = 0
    unused: list[str] = field(default_factory=list)


def new_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model whose parameters and buffers take no memory.

    Raises ModelError if the model's own code does not accept the configuration.
    """
    try:
        with torch.device("meta"):
            return model_class(config)
    except Exception as error:  # each model's code fails in its own way
        raise ModelError(
            f"transformers cannot build {model_class.__name__} from this configuration: {type(error).__name__}: {error}"
        ) from error


def build_skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose parameters take no memory. Its computed buffers, such as frequencies, are real.

    dtype: of everything for which the model's own code names no other.
    Raises ModelError if the model's own code does not accept the configuration.
    """
    with local_torch_dtype(dtype, model_class.__name__):
        model = new_model(model_class, config)
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, last = name.rpartition(".")
        value = torch.empty_like(buffer, device="cpu")
        model.get_submodule(owner).register_buffer(last, value, persistent=False)
    model.initialize_weights()  # computes the buffers; parameters without memory stay as they are
    return model.eval().requires_grad_(False)


def assign_weights(model: PreTrainedModel, source: WeightSource, policy: WeightPolicy) -> AssignedWeights:
    """Give a skeleton the weights of `source`, one module at a time.

    Raises ModelError, with the name, if a weight is missing or has another shape.
    """
    done = AssignedWeights()
    for name, module in list(model.named_modules()):
        if is_experts(module):
            _assign_experts(name, module, source, policy, done)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if type(module) is nn.Linear:
            own = replace(policy, coder=None) if is_router(name, modules) else policy
            _assign_linear(model, name, module, source, own, done)
        elif isinstance(module, nn.Embedding):
            _assign_embedding(model, name, module, source, policy, done)
    _tie_output(model, policy, done)
    _assign_rest(model, source, policy)
    _divide_frequencies(model, source)
    done.unused = source.unused()
    return done


def _assign_experts(
    name: str, module: nn.Module, source: WeightSource, policy: WeightPolicy, done: AssignedWeights
) -> None:
    found = source.experts(name, module.get_parameter(DOWN).shape[0])
    found = found or _joined_experts(name, module, source)
    if found is None:
        return  # missing, which is found out with the rest
    experts = [
        ExpertWeights(
            [_expert_weight(name, part, policy) for part in each.gate_up], _expert_weight(name, each.down, policy)
        )
        for each in found
    ]
    if all(is_plain(each.down) for each in experts) and all(
        is_plain(part) for each in experts for part in each.gate_up
    ):
        _assign_plain_experts(module, experts, policy)
        done.num_dequantised += sum(not is_plain(each.down) for each in found)
        return
    packed = [_packed_expert(name, gate_first(module, each), policy) for each in experts]
    replace_experts(module, packed, _expert_biases(name, module, source, policy))
    done.num_coded += len(packed)


def _expert_biases(
    name: str, module: Any, source: WeightSource, policy: WeightPolicy
) -> dict[str, torch.Tensor] | None:
    """Return the biases of a block's experts by the name of the parameter; None if it has none."""
    if not module.has_bias:
        return None
    biases = {}
    for part in (GATE_UP, DOWN):
        full_name, old = f"{name}.{bias_name(part)}", module.get_parameter(bias_name(part))
        value = source.tensor(full_name)
        if value is None:
            raise ModelError(f"it lacks {full_name}")
        require_same_shape(full_name, value, old)
        biases[part] = value.to(policy.device, policy.dtype)
    return biases


def _packed_expert(
    name: str, expert: ExpertWeights[Weight], policy: WeightPolicy
) -> ExpertWeights[Weight | PackedWeight]:
    return ExpertWeights([policy.packed(name, part) for part in expert.gate_up], policy.packed(name, expert.down))


def _assign_plain_experts(module: Any, experts: Sequence[ExpertWeights[Weight]], policy: WeightPolicy) -> None:
    """Give the model's own parameters plain weights, so that its own code and kernels run them."""
    for name, parts in ((GATE_UP, [each.gate_up for each in experts]), (DOWN, [[each.down] for each in experts])):
        values = torch.stack([_joined_values(module, own, policy) for own in parts])
        values = values.transpose(1, 2).contiguous() if module.is_transposed else values
        require_same_shape(name, values, module.get_parameter(name))
        setattr(module, name, _parameter(values))


def _joined_values(module: Any, parts: Sequence[Weight], policy: WeightPolicy) -> torch.Tensor:
    """Return [outputs, inputs], outputs in the order of the block's own parameter."""
    values = torch.cat([_plain_values(weight, policy) for weight in parts])
    return values if len(parts) == 1 else in_own_order(module, values.T).T


def _joined_experts(name: str, module: Any, source: WeightSource) -> list[ExpertWeights[Weight]] | None:
    """Return the weights of experts that are 3-D tensors in the checkpoint, too; None if not."""
    gate_up, down = (source.tensor(f"{name}.{part}") for part in (GATE_UP, DOWN))
    if gate_up is None or down is None:
        return None
    for part, value in ((GATE_UP, gate_up), (DOWN, down)):
        _require_plain(f"{name}.{part}", value, module.get_parameter(part))
    gate_up, down = as_matrices(module, GATE_UP, gate_up), as_matrices(module, DOWN, down)
    return [
        ExpertWeights([FloatWeight(first.contiguous())], FloatWeight(second.contiguous()))
        for first, second in zip(gate_up, down, strict=True)
    ]


def _assign_linear(
    model: PreTrainedModel,
    name: str,
    module: nn.Linear,
    source: WeightSource,
    policy: WeightPolicy,
    done: AssignedWeights,
) -> None:
    weight = source.weight(name)
    if weight is None:
        return  # tied, or missing
    require_shape(name, module, weight)
    if module.bias is not None and (bias := source.tensor(f"{name}.bias")) is not None:
        require_same_shape(f"{name}.bias", bias, module.bias)
        module.bias = _parameter(bias.to(policy.device, policy.dtype))
    dtype = _dtype_of(model, f"{name}.weight", module.weight, policy)
    if dtype == policy.dtype:
        weight = policy.coded(name, weight)
    if is_plain(weight) or not policy.keeps_codes:
        done.num_dequantised += not is_plain(weight)
        module.weight = _parameter(_plain_values(weight, replace(policy, dtype=dtype)))
        return
    replace_linears(model, {name: policy.packed(name, weight)})
    done.num_coded += 1


def _assign_embedding(
    model: PreTrainedModel,
    name: str,
    module: nn.Embedding,
    source: WeightSource,
    policy: WeightPolicy,
    done: AssignedWeights,
) -> None:
    weight = source.weight(name)
    if weight is None:
        return
    require_shape(name, module, weight)
    if is_plain(weight) or not policy.keeps_codes:
        done.num_dequantised += not is_plain(weight)
        module.weight = _parameter(_plain_values(weight, policy))
        return
    model.set_submodule(name, WeightEmbedding(policy.packed(name, weight), module, policy.dtype))
    done.num_coded += 1


def _tie_output(model: PreTrainedModel, policy: WeightPolicy, done: AssignedWeights) -> None:
    """Let an output layer without a weight of its own use that of the embedding, as the model says."""
    for target, origin in model.all_tied_weights_keys.items():
        name, source_name = target.rpartition(".")[0], origin.rpartition(".")[0]
        module, embedding = model.get_submodule(name), model.get_submodule(source_name)
        if type(module) is not nn.Linear or not module.weight.is_meta:
            continue
        if isinstance(embedding, WeightEmbedding):
            replace_linears(model, {name: embedding.weight})
        elif isinstance(embedding, nn.Embedding) and policy.coder is not None:
            replace_linears(model, {name: policy.packed(name, policy.coder(name, embedding.weight.detach()))})
            done.num_coded += 1
        elif isinstance(embedding, nn.Embedding):
            module.weight = embedding.weight


def _assign_rest(model: PreTrainedModel, source: WeightSource, policy: WeightPolicy) -> None:
    """Assign biases, norms and every other parameter and persistent buffer."""
    missing = []
    for name, old in [*model.named_parameters(), *model.named_buffers()]:
        if not old.is_meta:
            continue
        owner, _, last = name.rpartition(".")
        module, value = model.get_submodule(owner), source.tensor(name)
        if value is None:
            missing.append(name)
            continue
        require_same_shape(name, value, old)
        dtype = _dtype_of(model, name, old, policy) if value.is_floating_point() else value.dtype
        value = value.to(policy.device, dtype)
        if isinstance(old, nn.Parameter):
            setattr(module, last, _parameter(value))
        else:
            module.register_buffer(last, value)
    if missing:
        raise ModelError(f"it lacks {len(missing)} weights of {type(model).__name__}, the first is {min(missing)}")


def _dtype_of(model: Any, name: str, old: torch.Tensor, policy: WeightPolicy) -> torch.dtype:
    """Return the dtype of a parameter or buffer, as transformers chooses it.

    A model keeps some in float32, such as what is added to the scores of experts, and names others itself.
    """
    for pattern, dtype in model._get_dtype_plan(policy.dtype).items():
        if re.search(pattern.replace("*", ".*"), name):
            return cast(torch.dtype, dtype)
    return old.dtype if old.is_floating_point() else policy.dtype


def _divide_frequencies(model: PreTrainedModel, source: WeightSource) -> None:
    factors = source.rope_factors()
    if factors is None:
        return
    for name, module in model.named_modules():
        frequencies = module._buffers.get("inv_freq")
        if frequencies is None:
            continue
        if frequencies.shape != factors.shape:
            raise ModelError(
                f"{len(factors)} factors of rotary frequencies do not fit {name}, which has {len(frequencies)}"
            )
        frequencies /= factors


def require_same_shape(name: str, value: torch.Tensor, old: torch.Tensor) -> None:
    """Raise ModelError unless a value has the shape of the model's parameter, and is no code."""
    _require_plain(name, value, old)
    if value.shape != old.shape:
        raise ModelError(
            f"{name} has the shape {tuple(value.shape)} in the checkpoint; its configuration says {tuple(old.shape)}"
        )


def _require_plain(name: str, value: torch.Tensor, old: torch.Tensor) -> None:
    """Raise ModelError if a tensor of codes would be read as the floats of a parameter."""
    if old.is_floating_point() and value.dtype not in _PLAIN_DTYPES:
        raise ModelError(
            f"{name} is {str(value.dtype).removeprefix('torch.')} in the checkpoint, and has no scales that are known; "
            "must be floats of 16 or 32 bits"
        )


def is_plain(weight: Weight) -> bool:
    """True for floats without scales that a plain parameter can hold."""
    return isinstance(weight, FloatWeight) and weight.scales is None and weight.values.dtype != torch.float8_e4m3fn


def _plain_values(weight: Weight, policy: WeightPolicy) -> torch.Tensor:
    if isinstance(weight, FloatWeight) and is_plain(weight):
        return weight.values.to(policy.device, policy.dtype)
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=policy.dtype, device=policy.device)
    step = max(1, DEQUANTISED_BYTES // (_BYTES_WHILE_DEQUANTISED * columns))
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        values[part] = take_rows(weight, part).dequantized().to(policy.dtype)
    return values


def _expert_weight(name: str, weight: Weight, policy: WeightPolicy) -> Weight:
    weight = policy.coded(name, weight)
    if is_plain(weight) or not policy.keeps_codes:
        return FloatWeight(_plain_values(weight, policy))
    return weight


def _parameter(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
