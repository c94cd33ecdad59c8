"""Reads float8_e4m3fn weights with scales, one for a tensor, row or block.

Methods: `fp8`, `fbgemm_fp8` (one scale a row), and `modelopt`.
"""

from typing import Any

import torch

from baton.core.errors import ModelError
from baton.model.linear.weights import FloatWeight, Weight
from baton.model.loading.quantised.module_tensors import Tensors, need, plain_weight

_SCALES = ("weight_scale_inv", "weight_scale")
"""Names of the factor by which values are multiplied. The first is that of DeepSeek and Qwen."""
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""Values of `quant_algo` whose weights are float8 with a scale for the tensor or each row."""


class Fp8Layout:
    """Layout of float8 with a scale for each block, as in DeepSeek-V3 and Qwen3, for each row, or for all."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Raises ModelError if the configuration is not usable."""
        block = config.get("weight_block_size")
        is_pair = isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) for size in block)
        if block is not None and not (is_pair and min(block) > 0):
            raise ModelError(f"quantization_config: weight_block_size is {block!r}; must be two positive integers")
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise ModelError(f"quantization_config: fmt is {config['fmt']!r}; must be e4m3")
        self._block = (block[0], block[1]) if block is not None else None
        self.description = "fp8 weights"

    def weight(self, module: str, tensors: Tensors) -> Weight:
        return plain_weight(module, tensors) or scaled_fp8(module, tensors, self._block)


def modelopt_layout(config: dict[str, Any]) -> Fp8Layout:
    """Return the layout of `quant_method: modelopt`. Raises ModelError unless it is FP8 or plain.

    It is plain without a `quant_algo`, as a checkpoint that has scales for KV only.
    """
    algorithm = config.get("quant_algo")
    if algorithm is not None and algorithm not in MODELOPT_ALGORITHMS:
        raise ModelError(
            f"quantization_config: ModelOpt with quant_algo {algorithm!r}; must be one of "
            f"{', '.join(MODELOPT_ALGORITHMS)}"
        )
    return Fp8Layout({})


def scaled_fp8(module: str, tensors: Tensors, block: tuple[int, int] | None) -> FloatWeight:
    """Return the weight of float8_e4m3fn values times scales.

    block: rows and columns that share a scale; None to take it from the shape of the scales, which is then
    one for all, one for each row, or one for each group of columns of a row.
    """
    values = need(module, tensors, "weight")
    if values.dtype != torch.float8_e4m3fn or values.dim() != 2:
        dtype = str(values.dtype).removeprefix("torch.")
        raise ModelError(f"{module}.weight is {dtype} of {values.dim()} dimensions; must be a float8_e4m3fn matrix")
    name = next((name for name in _SCALES if name in tensors), _SCALES[0])
    scales = need(module, tensors, name).float()
    rows, columns = values.shape
    if scales.numel() == 1:
        return FloatWeight(values, scales.reshape(1, 1), (rows, columns))
    if scales.dim() == 1 and len(scales) == rows:
        scales = scales[:, None]
    if block is None and scales.dim() == 2 and len(scales) == rows and columns % scales.shape[1] == 0:
        block = (1, columns // scales.shape[1])
    expected = None if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    if block is None or tuple(scales.shape) != expected:
        raise ModelError(
            f"{module}.{name} has the shape {tuple(scales.shape)}, which does not fit a weight of {rows} x {columns}"
            + ("" if block is None else f" in blocks of {block[0]} x {block[1]}")
        )
    return FloatWeight(values, scales, block)
