"""Reads GPTQ weights: words of codes along the inputs, zero points along the outputs, and groups of inputs.

Source: the packing of AutoGPTQ and GPTQModel (`checkpoint_format`, also called `format`, gptq and gptq_v2).
"""

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

BITS = (4, 8)
FORMATS = {"gptq": 1, "gptq_v2": 0}
"""Difference of the real zero points and the stored ones, by `checkpoint_format`."""


class GptqLayout:
    """Layout of `quant_method: gptq`, 4 or 8 bits. Modules without `qweight` are plain."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Raises ModelError if the configuration is not usable."""
        bits = config.get("bits")
        if bits not in BITS:
            raise ModelError(f"quantization_config: GPTQ with bits {bits!r}; must be 4 or 8")
        self._group = config.get("group_size")
        form = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if form not in FORMATS:
            raise ModelError(f"quantization_config: checkpoint_format is {form!r}; must be {' or '.join(FORMATS)}")
        if config.get("pack_dtype", "int32") != "int32":
            raise ModelError(f"quantization_config: pack_dtype is {config['pack_dtype']!r}; must be int32")
        overrides = config.get("dynamic")
        for pattern, values in overrides.items() if isinstance(overrides, dict) else ():
            if isinstance(values, dict) and values.get("bits", bits) not in BITS:
                raise ModelError(
                    f"quantization_config: dynamic has bits {values['bits']!r} for {pattern!r}; must be 4 or 8"
                )
        self._zero_offset = FORMATS[form]
        self._has_order = bool(config.get("desc_act", False))
        self.description = f"GPTQ weights of {bits} bits"

    def weight(self, module: str, tensors: Tensors) -> Weight:
        plain = plain_weight(module, tensors)
        if plain is not None:
            return plain
        words = need(module, tensors, "qweight")
        scales = need(module, tensors, "scales")
        packed_zeros = need(module, tensors, "qzeros")
        bits = _bits(module, words, packed_zeros)
        codes = unpack_words(words.T.contiguous(), bits)
        columns, num_groups = codes.shape[1], len(scales)
        zeros = unpack_words(_plus(packed_zeros, self._zero_offset, bits), bits)
        order = None
        g_idx = tensors.get("g_idx")
        if g_idx is not None and (self._has_order or bool(g_idx.any())):  # unused, it may be all zeros
            order = in_group_order(module, g_idx, columns, num_groups, self._group)
        if order is not None:
            codes = codes[:, order]
        return grouped_weight(module, codes.contiguous(), bits, scales.T, zeros.T, self._group, order)


def _plus(words: torch.Tensor, offset: int, bits: int) -> torch.Tensor:
    """Return int32 words with `offset` added to each integer in them, with a carry to the next one.

    GPTQModel writes version 1 by subtracting from whole words. A zero point of 0 then takes 1 from its
    neighbour, which the carry gives back.
    """
    ones = sum(1 << shift for shift in range(0, 32, bits))
    total = words.long() + offset * ones
    return ((total + 2**31) % 2**32 - 2**31).to(torch.int32)


def _bits(module: str, words: torch.Tensor, zeros: torch.Tensor) -> int:
    """Return the bits of a module's codes, which `dynamic` may set: a zero point has as many as a code."""
    for name, tensor in (("qweight", words), ("qzeros", zeros)):
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{module}.{name} is {dtype} of {tensor.dim()} dimensions; must be an int32 matrix")
    bits = 32 * zeros.shape[1] / max(1, words.shape[1])
    if bits not in BITS:
        raise ModelError(
            f"{module}.qzeros has {zeros.shape[1]} words for {words.shape[1]} outputs, {bits:g} bits each; "
            "must be 4 or 8"
        )
    return int(bits)
