"""Describes a packed model as an index with sections, and builds the model again from them."""

import ctypes
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.model.kernels.cpu.gemm_args import WeightFormat
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.embedding import WeightEmbedding
from baton.model.linear.experts import DOWN, GATE_UP, ExpertWeights, JoinedLinear, bias_name, replace_experts
from baton.model.linear.linear import Linear
from baton.model.linear.packed_weight import PackedWeight, PlacedBytes
from baton.model.loading.image.image_file import Bytes, ImageFile, ImageUnusable, Section
from baton.model.loading.image.image_memory import ImageMemory

MAPPED_BYTES = 1 << 20
"""Size from which on a tensor is read from the file by all processes. Smaller ones are copied."""
PROBE_TOKENS = 4
PROBE_ERROR = 0.05
"""Difference to the recorded logits that rounding may cause, as a fraction of their standard deviation."""


class NotAnImage(Exception):
    """The model has a part that an index cannot describe."""


def write_model(model: PreTrainedModel, memory: ImageMemory) -> dict[str, Any]:
    """Write all that a model consists of but its packed weights, which are written already. Return its index.

    Large tensors of the model then lie in the mapped file. Raises NotAnImage, or OSError if the disk is full.
    """
    weights: dict[int, int] = {}
    described: list[dict[str, Any]] = []

    def number_of(weight: Any) -> int:
        if not isinstance(weight, PackedWeight) or (section := memory.section_at(weight.memory.address)) is None:
            raise NotAnImage(f"a weight is a {type(weight).__name__} outside of the file")
        if id(weight) not in weights:
            weights[id(weight)] = len(described)
            described.append(
                {
                    "shape": weight.shape,
                    "format": bytes(weight.format).hex(),
                    "section": _section_json(section),
                    "order": None if weight.input_order is None else _write_tensor(weight.input_order, memory),
                }
            )
        return weights[id(weight)]

    modules = _describe_modules(model, number_of)
    originals = {
        f"{name}:{buffer}": _write_tensor(value, memory)
        for name, module in model.named_modules()
        if isinstance(module, WeightEmbedding)
        for buffer, value in module.original.named_buffers()
    }
    tensors: dict[str, Any] = {}
    seen: dict[int, str] = {}
    for name, value in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if id(value) in seen:
            tensors[name] = {"same_as": seen[id(value)]}
            continue
        seen[id(value)] = name
        tensors[name] = _write_tensor(value, memory) | {"is_parameter": isinstance(value, nn.Parameter)}
    probe = _write_tensor(probe_logits(model).clone(), memory)  # not of inference mode
    return {"weights": described, "modules": modules, "originals": originals, "tensors": tensors, "probe": probe}


def read_model(model: PreTrainedModel, file: ImageFile, kernels: Kernels, dtype: torch.dtype) -> list[PackedWeight]:
    """Give a skeleton everything that the file has, and return its packed weights.

    Raises ImageUnusable if the file does not fit the model.
    """
    try:
        return _read(model, file, kernels, dtype)
    except ImageUnusable:
        raise
    except Exception as error:  # an index of another version, or a model whose code has changed
        raise ImageUnusable(f"it does not fit the model: {type(error).__name__}: {error}") from error


def _read(model: PreTrainedModel, file: ImageFile, kernels: Kernels, dtype: torch.dtype) -> list[PackedWeight]:
    index = file.index
    weights = [_packed_weight(entry, file, kernels, dtype) for entry in index["weights"]]
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in index["tensors"].items():
        known = entry.get("same_as")
        value = tensors[known] if known is not None else _tensor(entry, file)
        is_parameter = known is None and entry["is_parameter"]
        tensors[name] = nn.Parameter(value, requires_grad=False) if is_parameter else value
    for entry in index["modules"]:
        _restore(model, entry, weights, tensors, dtype)
    for name, entry in index["originals"].items():
        module, _, buffer = name.partition(":")
        embedding: Any = model.get_submodule(module)
        embedding.original.register_buffer(buffer, _tensor(entry, file), persistent=False)
    for name, value in tensors.items():
        owner, _, last = name.rpartition(".")
        place = model.get_submodule(owner)
        if isinstance(value, nn.Parameter):
            setattr(place, last, value)
        else:
            place.register_buffer(last, value, persistent=last not in place._non_persistent_buffers_set)
    left = [name for name, value in [*model.named_parameters(), *model.named_buffers()] if value.is_meta]
    if left:
        raise ImageUnusable(f"it lacks {len(left)} tensors, the first is {left[0]}")
    expected = _tensor(index["probe"], file)
    error = float((probe_logits(model) - expected).std() / expected.std())
    if not error <= PROBE_ERROR:
        raise ImageUnusable(f"the model gives other logits than when the file was made: they differ by {error:.2g}")
    return weights


@torch.inference_mode()
def probe_logits(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits after a few tokens, float32 [vocabulary], by the model's own attention."""
    own: Any = model
    before = own.config._attn_implementation
    own.set_attn_implementation("sdpa" if own._supports_sdpa else "eager")
    try:
        tokens = torch.arange(PROBE_TOKENS)[None] * (own.config.vocab_size // PROBE_TOKENS)
        logits: torch.Tensor = own(input_ids=tokens, use_cache=False).logits[0, -1].float()
    finally:
        own.set_attn_implementation(before)
    return logits


def _describe_modules(model: nn.Module, number_of: Callable[[Any], int]) -> list[dict[str, Any]]:
    """Return an entry for each module that a skeleton does not have; experts are described as a whole."""
    entries: list[dict[str, Any]] = []
    described: set[int] = set()  # modules within others; a parent comes before its children
    for name, module in model.named_modules():
        if isinstance(getattr(module, DOWN, None), nn.ModuleList):
            gate_up, down = ([_parts(each) for each in getattr(module, own)] for own in (GATE_UP, DOWN))
            described.update(id(part) for parts in (*gate_up, *down) for part in parts)
            weights = [
                [number_of(part.weight) for part in (*first, *last)] for first, last in zip(gate_up, down, strict=True)
            ]
            entries.append({"name": name, "kind": "experts", "weights": weights})
        elif isinstance(module, WeightEmbedding):
            entries.append({"name": name, "kind": "embedding", "weight": number_of(module.weight)})
        elif isinstance(module, Linear) and id(module) not in described:
            entries.append({"name": name, "kind": "linear", "weight": number_of(module.weight)})
    return entries


def _parts(module: Any) -> list[Linear]:
    return cast(list[Linear], list(module.parts)) if isinstance(module, JoinedLinear) else [module]


def _restore(
    model: nn.Module,
    entry: dict[str, Any],
    weights: list[PackedWeight],
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Put one module of the index into a skeleton."""
    name, kind = entry["name"], entry["kind"]
    module: Any = model.get_submodule(name)
    if kind == "experts":
        packed = [[weights[number] for number in own] for own in entry["weights"]]
        names = (GATE_UP, DOWN) if module.has_bias else ()
        biases = {own: module.get_parameter(bias_name(own)).detach() for own in names}  # get their values later
        replace_experts(module, [ExpertWeights(gate_up, down) for *gate_up, down in packed], biases or None)
        return
    weight = weights[entry["weight"]]
    if weight.shape != tuple(module.weight.shape):
        raise ImageUnusable(f"{name} has the shape {weight.shape}; the model says {tuple(module.weight.shape)}")
    is_embedding = kind == "embedding"
    new = WeightEmbedding(weight, module, dtype) if is_embedding else Linear(weight, tensors.get(f"{name}.bias"))
    model.set_submodule(name, new)


def _packed_weight(entry: dict[str, Any], file: ImageFile, kernels: Kernels, dtype: torch.dtype) -> PackedWeight:
    data = file.section(_section(entry))
    n, k = entry["shape"]
    weight = PackedWeight(
        kernels,
        WeightFormat.from_buffer_copy(bytes.fromhex(entry["format"])),
        (n, k),
        PlacedBytes(data.ctypes.data, len(data), data),
        dtype,
        None if entry["order"] is None else _tensor(entry["order"], file),
    )
    if (needed := kernels.packed_bytes(ctypes.byref(weight.args()))) != len(data):
        raise ImageUnusable(f"a weight of {n} x {k} has {len(data)} bytes; must be {needed}")
    return weight


def _write_tensor(value: torch.Tensor, memory: ImageMemory) -> dict[str, Any]:
    """Write a tensor; a large one then uses the mapped bytes."""
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    section, mapped = memory.write(data)
    shape = list(value.shape)
    if len(data) >= MAPPED_BYTES:
        value.data = _as_tensor(mapped, value.dtype, shape)
    return {"section": _section_json(section), "dtype": str(value.dtype).removeprefix("torch."), "shape": shape}


def _tensor(entry: dict[str, Any], file: ImageFile) -> torch.Tensor:
    data = file.section(_section(entry))
    value = _as_tensor(data, getattr(torch, entry["dtype"]), entry["shape"])
    return value if len(data) >= MAPPED_BYTES else value.clone()


def _as_tensor(data: Bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Return a tensor over memory that must not be written."""
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    memory: Any = (ctypes.c_uint8 * len(data)).from_address(data.ctypes.data)
    memory.owner = data  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _section_json(section: Section) -> list[Any]:
    return [section.offset, section.num_bytes, section.checksum]


def _section(entry: dict[str, Any]) -> Section:
    return Section(*entry["section"])
