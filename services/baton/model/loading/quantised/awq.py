"""Reads AWQ weights in the `gemm` packing: words of eight interleaved outputs, zero points, groups of inputs.

Source: the packing of AutoAWQ (`WQLinear_GEMM`).
"""

from typing import Any

import torch

from baton.core.errors import ModelError
from baton.model.linear.weights import Weight
from baton.model.loading.quantised.module_tensors import (
    Tensors,
    grouped_weight,
    need,
    plain_weight,
    unpack_words,
)

BITS = 4
NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word in which each of its eight outputs is."""


class AwqLayout:
    """Layout of `quant_method: awq`, version gemm, 4 bits. Modules that are not converted are plain."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Raises ModelError if the configuration is not usable."""
        bits = config.get("bits", config.get("w_bit", BITS))
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if bits != BITS:
            raise ModelError(f"quantization_config: AWQ with bits {bits!r}; must be {BITS}")
        if version != "gemm":
            raise ModelError(f"quantization_config: AWQ version {version!r}; must be gemm")
        if not config.get("zero_point", True):
            raise ModelError("quantization_config: AWQ without zero points (zero_point: false); must have them")
        self.description = "AWQ weights of 4 bits"

    def weight(self, module: str, tensors: Tensors) -> Weight:
        plain = plain_weight(module, tensors)
        if plain is not None:
            return plain
        codes = _by_output(module, "qweight", need(module, tensors, "qweight"))
        zeros = _by_output(module, "qzeros", need(module, tensors, "qzeros"))
        return grouped_weight(module, codes.T.contiguous(), BITS, need(module, tensors, "scales").T, zeros.T)


def _by_output(module: str, name: str, words: torch.Tensor) -> torch.Tensor:
    """Return the codes in words, uint8 [rows, outputs], with the outputs in order."""
    if words.dtype != torch.int32 or words.dim() != 2:
        dtype = str(words.dtype).removeprefix("torch.")
        raise ModelError(f"{module}.{name} is {dtype} of {words.dim()} dimensions; must be an int32 matrix")
    nibbles = unpack_words(words, BITS).view(len(words), -1, len(NIBBLE_OF_OUTPUT))
    return nibbles[:, :, list(NIBBLE_OF_OUTPUT)].reshape(len(words), -1)
