"""Gives the tensors of a GGUF file as the weights of a transformers model."""

from collections.abc import Sequence
from math import prod

import torch
from transformers import PreTrainedConfig

from baton.core.errors import ModelError
from baton.model.linear.experts import DOWN, GATE_UP, ExpertWeights, bias_name
from baton.model.linear.weight_packing import PANEL
from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import Weight
from baton.model.loading.gguf.gguf_architectures import ROPE_FACTORS, architecture_of, module_name
from baton.model.loading.gguf.gguf_config import LONGROPE_TENSORS
from baton.model.loading.gguf.gguf_file import GgufFile, TensorEntry
from baton.model.loading.gguf.gguf_metadata import GgufMetadata
from baton.model.loading.gguf.gguf_types import (
    floats_of,
    is_coded,
    is_dequantised,
    packed_bits_of,
    type_name,
    weight_of,
)
from baton.runtime.logging import get_logger

log = get_logger(__name__)

_ROTARY = ("self_attn.q_proj", "self_attn.k_proj")


class GgufSource:
    """Implements `WeightSource` for a GGUF file."""

    may_have_more = False  # llama.cpp uses every tensor of a file of these architectures

    def __init__(self, file: GgufFile, config: PreTrainedConfig) -> None:
        """config: of the model, from `gguf_config`. Raises ModelError for an unsupported architecture."""
        self._file = file
        self._architecture = architecture_of(GgufMetadata(file.path, file.metadata))
        self._config = config
        self._used: set[str] = set(LONGROPE_TENSORS.values())  # the configuration has them
        self._names: dict[str, str] = {}
        """Names in the file by names in the model."""
        for name in file.tensors:
            if (renamed := module_name(self._architecture, name)) is not None:
                self._names[renamed] = name
        self.description = f"GGUF {', '.join(_types(list(file.tensors.values())))}"
        rare = _types([entry for entry in file.tensors.values() if is_dequantised(entry.type_id)])
        if rare:
            hint = "they take 16 bits a weight; Q4_K, Q5_K, Q6_K, Q8_0, Q4_0 and the like stay as they are"
            log.warning("gguf_tensors_dequantised", types=rare, dtype="bfloat16", hint=hint)

    def weight(self, module: str) -> Weight | None:
        entry = self._entry(f"{module}.weight")
        if entry is None:
            return None
        if len(entry.shape) != 2:
            raise ModelError(f"{self._file.path}: {entry.name} has the shape {entry.shape}; must be a matrix")
        weight = weight_of(self._file.raw(entry), entry.type_id, entry.shape[0], entry.shape[1])
        heads = self._rotary_heads(module)
        return weight if heads is None else take_rows(weight, _halves_order(entry, heads))

    def is_coded(self, module: str) -> bool:
        of_experts = (f"{module}.down_proj.weight", f"{module}.down_proj.0.weight")
        own = next((self._names[name] for name in (f"{module}.weight", *of_experts) if name in self._names), None)
        return own is not None and is_coded(self._file.tensors[own].type_id)

    def packed_bytes(self) -> int:
        bits = 0.0
        for entry in self._file.tensors.values():
            if is_coded(entry.type_id):
                *_, rows, columns = (1, *entry.shape)
                padded = -(-rows // PANEL) * PANEL * columns
                bits += packed_bits_of(entry.type_id) * padded * (prod(entry.shape) // (rows * columns))
        return int(bits) // 8

    def experts(self, module: str, num_experts: int) -> Sequence[ExpertWeights[Weight]] | None:
        gate, up, down = (self._expert_weights(f"{module}.{name}_proj", num_experts) for name in ("gate", "up", "down"))
        if gate is None or up is None or down is None:
            return None
        return [ExpertWeights(parts[:2], parts[2]) for parts in zip(gate, up, down, strict=True)]

    def tensor(self, name: str) -> torch.Tensor | None:
        module, _, last = name.rpartition(".")
        if last == bias_name(GATE_UP):
            gate, up = (self.tensor(f"{module}.{part}_proj.bias") for part in ("gate", "up"))
            # in turns, as in gpt-oss, the only architecture here whose experts have biases
            return None if gate is None or up is None else torch.stack((gate, up), dim=-1).flatten(-2)
        entry = self._entry(f"{module}.{DOWN}.bias" if last == bias_name(DOWN) else name)
        if entry is None:
            return None
        values = floats_of(self._file.raw(entry), entry.type_id, entry.shape)
        if last == "bias" and (heads := self._rotary_heads(module)) is not None:
            return values[_halves_order(entry, heads)]
        if last == "weight" and module.endswith("norm"):
            return values - self._architecture.norm_offset
        return values

    def rope_factors(self) -> torch.Tensor | None:
        entry = self._file.tensors.get(ROPE_FACTORS)
        if entry is None:
            return None
        self._used.add(ROPE_FACTORS)
        return floats_of(self._file.raw(entry), entry.type_id, entry.shape)

    def unused(self) -> list[str]:
        return sorted(self._file.tensors.keys() - self._used)

    def _entry(self, name: str) -> TensorEntry | None:
        own = self._names.get(name)
        if own is None:
            return None
        self._used.add(own)
        return self._file.tensors[own]

    def _rotary_heads(self, module: str) -> int | None:
        """Return the number of heads of a module whose rows must be put into order; None for any other."""
        if not self._architecture.permutes_rotary or not module.endswith(_ROTARY):
            return None
        config = self._config
        return config.num_attention_heads if module.endswith(_ROTARY[0]) else config.num_key_value_heads

    def _expert_weights(self, module: str, num_experts: int) -> list[Weight] | None:
        """Return the weights of one product of all experts, which are one tensor, or one for each."""
        entry = self._entry(f"{module}.weight")
        if entry is None:
            return self._separate_experts(module, num_experts)
        if len(entry.shape) != 3 or entry.shape[0] != num_experts:
            raise ModelError(
                f"{self._file.path}: {entry.name} has the shape {entry.shape}; must be 3-D, of {num_experts} experts"
            )
        parts = self._file.raw(entry).view(num_experts, -1)
        return [weight_of(part, entry.type_id, entry.shape[1], entry.shape[2]) for part in parts]

    def _separate_experts(self, module: str, num_experts: int) -> list[Weight] | None:
        if f"{module}.0.weight" not in self._names:
            return None
        found: list[Weight] = []
        for number in range(num_experts):
            weight = self.weight(f"{module}.{number}")
            if weight is None:
                raise ModelError(
                    f"{self._file.path} lacks expert {number} of {num_experts} of {module}; download or copy it again"
                )
            found.append(weight)
        return found


def _halves_order(entry: TensorEntry, num_heads: int) -> torch.Tensor:
    """Return the rows in the order of transformers: all first halves of a head's pairs, then all second ones.

    llama.cpp stores the two rows of a pair next to each other.
    """
    rows = entry.shape[0]
    if rows % (2 * num_heads):
        raise ModelError(f"{entry.name} has {rows} rows; must be a multiple of twice its {num_heads} heads")
    return torch.arange(rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def _types(entries: Sequence[TensorEntry]) -> list[str]:
    """Return the names of the tensor types, those with the most values first."""
    sizes: dict[str, int] = {}
    for entry in entries:
        name = type_name(entry.type_id)
        sizes[name] = sizes.get(name, 0) + prod(entry.shape)
    return sorted(sizes, key=lambda name: (-sizes[name], name))
