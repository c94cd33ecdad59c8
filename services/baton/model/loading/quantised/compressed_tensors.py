"""Reads checkpoints of compressed-tensors: integers, packed or not, and float8, by groups of modules.

Source: the library's formats (compressed_tensors/compressors) and its matching of modules (utils/match.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.core.errors import ModelError
from baton.model.linear.weights import Weight
from baton.model.loading.quantised.module_tensors import (
    Tensors,
    grouped_weight,
    in_group_order,
    need,
    plain_weight,
    unpack_words,
)
from baton.model.loading.quantised.mxfp4 import mxfp4_weight
from baton.model.loading.quantised.scaled_floats import scaled_fp8

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "dense")
DENSE = "dense"
"""Format of weights that are not quantised yet, beside the scales that were found for them."""
MIXED = "mixed-precision"
"""Format of a checkpoint whose groups have formats of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroup:
    """Modules that are stored alike. targets: class names, module names, or `re:` and an expression."""

    targets: tuple[str, ...]
    format: str
    bits: int
    is_float: bool
    is_symmetric: bool
    block: tuple[int, int] | None


class CompressedTensorsLayout:
    """Layout of `quant_method: compressed-tensors`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ModelError if the configuration is not usable, or asks for what is not supported."""
        for key, what in (("sparsity_config", "sparsity"), ("transform_config", "transforms of weights")):
            part = config.get(key) or {}
            is_dense = isinstance(part, Mapping) and part.get("format") == "dense"
            if part and not is_dense and part != {"config_groups": {}}:
                raise ModelError(f"quantization_config: {key} is set; {what} of compressed-tensors are not supported")
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise ModelError("quantization_config: config_groups of compressed-tensors must be groups by name")
        described = [
            _module_group(str(name), group, config)
            for name, group in groups.items()
            if group.get("weights") is not None
        ]  # the others quantise activations or KV only
        self._groups = {target: group for group in described for target in group.targets}
        self._ignored = tuple(map(str, config.get("ignore") or ()))
        kinds = sorted(
            {f"{'fp' if group.is_float else 'int'}{group.bits}" for group in described if group.format != DENSE}
        )
        self.description = f"compressed-tensors {', '.join(kinds) or 'plain'} weights"

    def weight(self, module: str, tensors: Tensors) -> Weight:
        plain = plain_weight(module, tensors)
        if plain is not None:
            return plain
        group = self._group_of(module)
        if group.format == DENSE:
            return _dense(module, tensors)
        if group.format == "mxfp4-pack-quantized":
            packed, scales = need(module, tensors, "weight_packed"), need(module, tensors, "weight_scale")
            return mxfp4_weight(module, packed, scales)
        if group.is_float:
            return scaled_fp8(module, tensors, group.block)
        if "weight_packed" in tensors:
            return _packed_integers(module, tensors, group)
        return _integers(module, tensors, group)

    def _group_of(self, module: str) -> ModuleGroup:
        """Return the group of a quantised module. Raises ModelError if the configuration does not name it."""
        if any(_matches(module, target) for target in self._ignored):
            raise ModelError(f"{module} has quantised tensors, but quantization_config ignores it")
        found = [target for target in self._groups if _matches(module, target)]
        if not found:
            raise ModelError(f"{module} has quantised tensors, but no group of quantization_config has it as a target")
        return self._groups[min(found, key=_precedence)]


def _module_group(name: str, group: Mapping[str, Any], config: Mapping[str, Any]) -> ModuleGroup:
    weights = group["weights"]
    if not isinstance(weights, Mapping):
        raise ModelError(f"quantization_config: {name} has weights {weights!r}; must be a description, or null")
    form = group.get("format") or config.get("format")
    form = "naive-quantized" if form == MIXED else form
    if form not in FORMATS:
        raise ModelError(f"quantization_config: {name} has the format {form!r}; must be one of {', '.join(FORMATS)}")
    bits, is_float = weights.get("num_bits"), weights.get("type", "int") == "float"
    allowed = (4,) if form.startswith("mxfp4") else (8,) if is_float else (4, 8)
    if form != DENSE and (bits is None or bits not in allowed):
        kind = "floats" if is_float else "integers"
        raise ModelError(
            f"quantization_config: {name} has {kind} of {bits!r} bits; must be {' or '.join(map(str, allowed))}"
        )
    return ModuleGroup(
        targets=tuple(map(str, _listed(group.get("targets")))),
        format=form,
        bits=int(bits or 0),
        is_float=is_float,
        is_symmetric=bool(weights.get("symmetric", True)),
        block=_block(name, weights),
    )


def _block(name: str, weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a block of weights that share a scale; None without blocks."""
    if weights.get("strategy") != "block":
        return None
    block = weights.get("block_structure")
    sizes = block.split("x") if isinstance(block, str) else _listed(block)  # older versions wrote "128x128"
    if len(sizes) != 2 or not all(str(size).isdecimal() and int(size) for size in sizes):
        raise ModelError(
            f"quantization_config: {name} has the block_structure {block!r}; must be two positive integers"
        )
    return int(sizes[0]), int(sizes[1])


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _matches(module: str, target: str) -> bool:
    """True if a target names a linear layer: its class, its name, or an expression that matches its name."""
    if target.startswith("re:"):
        try:
            return re.match(target[3:], module) is not None
        except re.error as error:
            raise ModelError(f"quantization_config: {target!r} is not a valid expression ({error})") from error
    return target in ("Linear", module)


def _precedence(target: str) -> tuple[int, str]:
    """Return a key by which the target that decides a module's group comes first: the most specific one."""
    return 2 if target == "Linear" else 1 if target.startswith("re:") else 0, target


def _dense(module: str, tensors: Tensors) -> Weight:
    weight = plain_weight(module, {"weight": need(module, tensors, "weight")})
    if weight is None:
        dtype = str(tensors["weight"].dtype).removeprefix("torch.")
        raise ModelError(f"{module}.weight is {dtype}; in the format {DENSE} it must be floats of 16 or 32 bits")
    return weight


def _packed_integers(module: str, tensors: Tensors, group: ModuleGroup) -> Weight:
    words, shape = need(module, tensors, "weight_packed"), need(module, tensors, "weight_shape").tolist()
    scales = _matrix(need(module, tensors, "weight_scale"))
    sizes = shape if isinstance(shape, list) and len(shape) == 2 else [0, 0]
    if words.dtype != torch.int32 or words.dim() != 2 or len(words) != sizes[0]:
        raise ModelError(f"{module}.weight_packed is not an int32 matrix of {shape} values; the checkpoint is damaged")
    rows, columns = sizes
    if columns < 1 or words.shape[1] != -(-columns * group.bits // 32):
        raise ModelError(
            f"{module}.weight_shape is {shape}; weight_packed has {words.shape[1]} words in a row of {group.bits}-bit "
            "values, which is another number"
        )
    codes = unpack_words(words, group.bits)[:, :columns].contiguous()
    zeros = None
    if not group.is_symmetric:
        zeros = _zero_points(module, need(module, tensors, "weight_zero_point"), group.bits)[:rows].contiguous()
    return _ordered(module, tensors, codes, group.bits, scales, zeros)


def _zero_points(module: str, stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Return zero points as codes. They are in words along the outputs, or one int8 for the whole tensor."""
    if stored.dtype == torch.int8:
        return _matrix(stored).int() + (1 << (bits - 1))
    if stored.dtype != torch.int32 or stored.dim() != 2:
        dtype = str(stored.dtype).removeprefix("torch.")
        raise ModelError(f"{module}.weight_zero_point is {dtype} of {stored.dim()} dimensions; must be an int32 matrix")
    return unpack_words(stored.T.contiguous(), bits).T


def _integers(module: str, tensors: Tensors, group: ModuleGroup) -> Weight:
    """Read int8 values, which also hold integers of 4 bits."""
    values = need(module, tensors, "weight")
    if values.dtype != torch.int8 or values.dim() != 2:
        dtype = str(values.dtype).removeprefix("torch.")
        raise ModelError(f"{module}.weight is {dtype} of {values.dim()} dimensions; must be an int8 matrix")
    half = 1 << (group.bits - 1)
    if group.bits < 8 and bool(((values < -half) | (values >= half)).any()):
        raise ModelError(f"{module}.weight has values beyond {group.bits} bits; the checkpoint is damaged")
    codes = (values.short() + half).to(torch.uint8)
    zeros = None
    if not group.is_symmetric:
        zeros = _matrix(need(module, tensors, "weight_zero_point")).int() + half
    return _ordered(module, tensors, codes, group.bits, _matrix(need(module, tensors, "weight_scale")), zeros)


def _ordered(
    module: str, tensors: Tensors, codes: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor | None
) -> Weight:
    rows, columns = codes.shape
    if scales.shape == (1, 1):  # one scale for the whole tensor
        scales = scales.expand(rows, 1)
        zeros = None if zeros is None else zeros.expand(rows, 1)
    order = None
    if (g_idx := tensors.get("weight_g_idx")) is not None and not bool((g_idx == -1).all()):
        order = in_group_order(module, g_idx, columns, max(1, scales.shape[1]))
    if order is not None:
        codes = codes[:, order].contiguous()
    return grouped_weight(module, codes, bits, scales, zeros, input_order=order)


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return scales or zero points as a matrix with a row for each output, or one for all."""
    return tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor
