"""Quantises plain weights of linear layers to codes, one scale for each group of inputs."""

import torch

from baton.core.errors import ModelError
from baton.model.linear.weights import CODE_BITS, CodedWeight, GroupFactors


def quantise(weight: torch.Tensor, bits: int, group_size: int) -> CodedWeight:
    """Return the symmetric codes that are nearest to `weight` [n, k].

    The largest value of a group, with its sign, becomes the outermost code, as in Q4_0. Scales are rounded to
    float16. Raises ModelError if `bits` is not supported, LayoutMismatch if groups do not divide k.
    """
    if bits not in CODE_BITS:
        raise ModelError(f"bits is {bits}; must be one of {', '.join(map(str, CODE_BITS))}")
    rows, columns = weight.shape
    half = 1 << (bits - 1)
    groups = weight.float().reshape(-1, min(group_size, columns))
    extremes = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    scales = (extremes / -half).half().float()
    inverses = torch.where(scales == 0, torch.zeros_like(scales), 1 / scales)
    codes = ((groups * inverses).round() + half).clamp_(0, 2 * half - 1).to(torch.uint8)
    return CodedWeight(codes.view(rows, columns), bits, group_size, GroupFactors(scales.view(rows, -1), group_size))
