"""Reads the weights of a quantised or plain checkpoint in safetensors, one module at a time."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from baton.core.errors import ModelError
from baton.model.linear.experts import STACKED, ExpertWeights, as_matrices
from baton.model.linear.weights import FloatWeight, Weight
from baton.model.loading.model_fingerprint import weight_files
from baton.model.loading.quantised.module_tensors import CheckpointLayout, Tensors
from baton.model.loading.quantised.mxfp4 import mxfp4_weight

_BIAS = "bias"
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4} | dict.fromkeys(
    ("F16", "BF16", "I16", "U16"), 2
)
"""Bytes of an element by the name of its type; one of the others."""
_EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of gate, up and down projection of an expert. The second are those of Mixtral."""
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_PLAIN_TYPES = {"F32", "F16", "BF16"}
"""Types of weights that are not quantised. They may have scales, of activations or not used yet."""
_CODE_TYPES = {"I8", "U8", "I32", "F8_E4M3", "F8_E5M2"}
"""Types of codes, packed or not, and of float8."""
_KV_SCALES = {"k_scale", "v_scale", "output_scale"}
"""Last parts of the names of scales of KV, which are not used: KV has the dtype of `--kv-dtype`."""


class SafetensorsSource:
    """Implements `WeightSource` for a directory of safetensors files. Use it as a context manager."""

    may_have_more = True  # scales of activations and of KV, buffers of older versions

    def __init__(
        self,
        model_dir: Path,
        model: PreTrainedModel,
        layout: CheckpointLayout | None,
        own_name: Callable[[str], str | None] = lambda name: name,
        transposed: Collection[str] = (),
    ) -> None:
        """Open the files.

        model: its skeleton, which tells how names of the checkpoint are translated. layout: None if the
        checkpoint is not quantised. own_name: returns a tensor's name in the model, if the checkpoint is of a
        larger one; None if it is not of the model. transposed: names of the layers whose plain weights are
        [inputs, outputs]; codes never are. Raises ModelError if a file is missing or unreadable.
        """
        self._model = model
        self._own_name = own_name
        self._transposed = transposed
        self.description = "plain" if layout is None else layout.description
        self._layout = layout
        self._dir = model_dir
        self._stack = ExitStack()
        self._places: dict[str, tuple[Any, str]] = {}
        self._of_module: dict[str, list[str]] = defaultdict(list)
        self._used: set[str] = set()
        self._fused = {"_blocks": self._mxfp4_experts, "_scale_inv": self._fp8_experts, "_scale": self._fp8_experts}
        """Readers of experts in one tensor, by what follows the name of the tensor beside it."""
        try:
            self._open(model)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, model: PreTrainedModel) -> None:
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        for path in weight_files(self._dir):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{path} is not a readable safetensors file ({error}); download or copy it again"
                ) from error
            for key in file.keys():  # noqa: SIM118 - it is not a dict
                if (own := self._own_name(key)) is None:
                    continue
                name = self._with_prefix(rename_source_key(own, renamings, [])[0])
                self._places[name] = (file, key)
                self._of_module[name.rpartition(".")[0]].append(name)

    def _with_prefix(self, name: str) -> str:
        """Return the name of a tensor in the model. GPT-2's checkpoints have the names of the base model."""
        model, first = self._model, name.partition(".")[0]
        is_of_base = not hasattr(model, first) and hasattr(model.base_model, first)
        return f"{model.base_model_prefix}.{name}" if is_of_base else name

    def __enter__(self) -> "SafetensorsSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def weight(self, module: str) -> Weight | None:
        tensors = self._module_tensors(module)
        if not tensors:
            return None
        weight = self._read_weight(module, tensors)
        if module not in self._transposed or not isinstance(weight, FloatWeight):
            return weight
        if weight.scales is not None:
            raise ModelError(f"{module} has a transposed weight with scales; only plain weights may be transposed")
        return FloatWeight(weight.values.T.contiguous())

    def _read_weight(self, module: str, tensors: Tensors) -> Weight:
        if self._layout is not None:
            return self._layout.weight(self._stored_name(module), tensors)
        if tensors.keys() - _KV_SCALES != {"weight"}:
            raise ModelError(f"{module} has tensors {', '.join(sorted(tensors))}, but no quantization_config")
        return FloatWeight(tensors["weight"])

    def is_coded(self, module: str) -> bool:
        expert = self._expert_names(module)
        return self._is_coded(f"{module}.0.{expert[2]}" if expert else module)

    def packed_bytes(self) -> int:
        """Count the stored tensors, and two float32 for each scale or each 64 bytes of codes."""
        total = 0
        for module, names in self._of_module.items():
            if not self._is_coded(module):
                continue
            slices = {name: file.get_slice(key) for name in names for file, key in [self._places[name]]}
            sizes = {name: prod(each.get_shape()) for name, each in slices.items()}
            stored = sum(size * _ITEM_BYTES.get(slices[name].get_dtype(), 1) for name, size in sizes.items())
            scales = sum(size for name, size in sizes.items() if "scale" in name.rpartition(".")[2])
            total += stored + 8 * max(scales, stored // 64)
        return total

    def _is_coded(self, checkpoint_module: str) -> bool:
        """True if tensors of a module hold codes: scales alone do not make it quantised."""
        if self._layout is None:
            return False
        names = self._of_module.get(checkpoint_module, ())
        types = {name.rpartition(".")[2]: self._type(name) for name in names}
        is_plain = types.get("weight") in _PLAIN_TYPES
        return not is_plain and any(kind in _CODE_TYPES for last, kind in types.items() if last != _BIAS)

    def _type(self, name: str) -> str:
        """Return the type of a tensor, as safetensors calls it."""
        file, key = self._places[name]
        return str(file.get_slice(key).get_dtype())

    def experts(self, module: str, num_experts: int) -> Sequence[ExpertWeights[Weight]] | None:
        read = next((read for mark, read in self._fused.items() if f"{module}.{_GATE_UP}{mark}" in self._places), None)
        if read is not None:
            both = [read(module, name, num_experts) for name in (_GATE_UP, _DOWN)]
            return [ExpertWeights([first], second) for first, second in zip(*both, strict=True)]
        names = self._expert_names(module)
        if names is None:
            return self._stacked_experts(module, num_experts)
        found = []
        for number in range(num_experts):
            gate, up, down = (self._expert(f"{module}.{number}.{name}") for name in names)
            found.append(ExpertWeights([gate, up], down))
        return found

    def tensor(self, name: str) -> torch.Tensor | None:
        if name not in self._places:
            return None
        file, key = self._places[name]
        self._used.add(name)
        try:
            tensor: torch.Tensor = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self._dir}: {key} cannot be read ({error}); download or copy it again") from error
        return tensor

    def rope_factors(self) -> torch.Tensor | None:
        return None

    def unused(self) -> list[str]:
        return sorted(self._places.keys() - self._used)

    def _module_tensors(self, module: str) -> Tensors:
        """Read all tensors of a module but its bias."""
        found = {}
        for name in self._of_module.get(module, ()):
            last = name.rpartition(".")[2]
            if last != _BIAS and (tensor := self.tensor(name)) is not None:
                found[last] = tensor
        return found

    def _stored_name(self, module: str) -> str:
        """Return the name of a module in the checkpoint, which its quantization_config uses, too."""
        _, key = self._places[self._of_module[module][0]]
        return key.rpartition(".")[0]

    def _expert_names(self, module: str) -> tuple[str, str, str] | None:
        """Return the names of an expert's projections; None if the block is not stored by expert."""
        return next((names for names in _EXPERT_NAMES if f"{module}.0.{names[0]}" in self._of_module), None)

    def _expert(self, module: str) -> Weight:
        weight = self.weight(module)
        if weight is None:
            raise ModelError(f"{self._dir} is incomplete: it has no weight of {module}")
        return weight

    def _stacked_experts(self, module: str, num_experts: int) -> list[ExpertWeights[Weight]] | None:
        """Read experts of DBRX, see `STACKED`; None if there are none."""
        stacked = [tensor for name in STACKED if (tensor := self.tensor(f"{module}.{name}")) is not None]
        if len(stacked) < len(STACKED):
            return None
        by_expert = zip(*(tensor.chunk(num_experts) for tensor in stacked), strict=True)
        return [
            ExpertWeights([FloatWeight(gate), FloatWeight(up)], FloatWeight(down.T.contiguous()))
            for gate, up, down in by_expert
        ]

    def _fp8_experts(self, module: str, name: str, num_experts: int) -> list[Weight]:
        values = self.tensor(f"{module}.{name}")
        kind = "scale_inv" if f"{module}.{name}_scale_inv" in self._places else "scale"
        scales = self.tensor(f"{module}.{name}_{kind}")
        if self._layout is None or values is None or scales is None or {len(values), len(scales)} != {num_experts}:
            raise ModelError(f"{module}.{name} has no FP8 values and scales for {num_experts} experts")
        matrices = as_matrices(self._model.get_submodule(module), name, values)
        if matrices.shape != values.shape and scales.dim() == 3:
            scales = scales.transpose(1, 2)
        found = []
        for number in range(num_experts):
            tensors = {"weight": matrices[number].contiguous(), f"weight_{kind}": scales[number].contiguous()}
            found.append(self._layout.weight(f"{module}.{name}[{number}]", tensors))
        return found

    def _mxfp4_experts(self, module: str, name: str, num_experts: int) -> list[Weight]:
        blocks, scales = (self.tensor(f"{module}.{name}_{kind}") for kind in ("blocks", "scales"))
        if blocks is None or scales is None or len(blocks) != num_experts or len(scales) != num_experts:
            raise ModelError(f"{module}.{name} has no MXFP4 blocks and scales for {num_experts} experts")
        return [
            mxfp4_weight(f"{module}.{name}[{number}]", blocks[number], scales[number]) for number in range(num_experts)
        ]
