"""Reads MXFP4 weights as gpt-oss stores them: blocks of 32 values of 4 bits (E2M1) and an exponent each.

Source: OCP Microscaling Formats (MX) 1.0, and the checkpoints of openai/gpt-oss.
"""

from typing import Any

import torch

from baton.core.errors import ModelError
from baton.model.linear.weights import CodedWeight, GroupFactors, Weight
from baton.model.loading.gguf.block_formats import MXFP4_VALUES, mx_scales
from baton.model.loading.quantised.module_tensors import Tensors, need, plain_weight

BLOCK = 32


class Mxfp4Layout:
    """Layout of `quant_method: mxfp4`: experts have NAME_blocks and NAME_scales, the rest is plain."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.description = "mxfp4 weights of experts"

    def weight(self, module: str, tensors: Tensors) -> Weight:
        plain = plain_weight(module, tensors)
        return plain or mxfp4_weight(module, need(module, tensors, "blocks"), need(module, tensors, "scales"))


def mxfp4_weight(module: str, blocks: torch.Tensor, scales: torch.Tensor) -> CodedWeight:
    """Return the weight of one matrix.

    blocks: uint8 [n, k / 32, 16] or [n, k / 2]; a byte holds two values, the lower bits first. scales: uint8
    [n, k / 32], exponents with a bias of 127. Raises ModelError if they are something else.
    """
    rows, num_blocks = scales.shape if scales.dim() == 2 else (0, 0)
    if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.numel() != rows * num_blocks * BLOCK // 2 or not rows:
        raise ModelError(
            f"{module} has MXFP4 blocks of the shape {tuple(blocks.shape)} and scales of {tuple(scales.shape)}; "
            f"must be bytes, and {BLOCK // 2} of blocks for each scale"
        )
    packed = blocks.reshape(rows, -1)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(rows, -1)
    return CodedWeight(codes, 4, BLOCK, GroupFactors(mx_scales(scales), BLOCK), None, MXFP4_VALUES)
