"""Rounds a float weight to integer codes with a scale, and perhaps an offset, per group of inputs."""

import torch

from baton.core.errors import LayoutMismatch, ModelError
from baton.model.linear.weights import CODE_BITS, GROUP_SIZES, CodedWeight, GroupFactors

ROWS_AT_A_TIME = 4096
"""Outputs that are rounded together. It bounds the float32 memory that a large vocabulary takes."""
MIN_HALF, MAX_HALF = 2.0**-14, 65504.0
"""Smallest and largest normal float16."""


def quantise(weight: torch.Tensor, bits: int, group_size: int, *, has_offsets: bool = False) -> CodedWeight:
    """Return the codes that are nearest to `weight` [n, k].

    has_offsets: the codes of a group spread between its smallest and its largest value; else they are
    symmetric around zero, and the value of the largest size gets the outermost code, as in Q4_0.

    Factors are rounded to float16 before the codes are chosen, wherever they are normal numbers in it. They
    are then packed in 16 bits without loss. Raises ModelError if `bits` or `group_size` is not supported,
    LayoutMismatch if groups do not divide k.
    """
    n, k = weight.shape
    if bits not in CODE_BITS:
        raise ModelError(f"bits is {bits}; must be one of {', '.join(map(str, CODE_BITS))}")
    if group_size not in GROUP_SIZES:
        raise ModelError(f"group_size is {group_size}; must be one of {', '.join(map(str, GROUP_SIZES))}")
    if k % group_size:
        raise LayoutMismatch(f"{k} inputs are not a multiple of the group size {group_size}")
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales, offsets = (torch.empty(n, k // group_size) for _ in range(2))
    choose_factors = _range_factors if has_offsets else _symmetric_factors
    for begin in range(0, n, ROWS_AT_A_TIME):
        rows = slice(begin, begin + ROWS_AT_A_TIME)
        groups = weight[rows].float().unflatten(1, (-1, group_size))
        scales[rows], offsets[rows] = choose_factors(groups, bits)
        steps = (groups - offsets[rows, :, None]) / torch.where(scales[rows] == 0, 1.0, scales[rows])[..., None]
        codes[rows] = steps.round_().clamp_(0, 2**bits - 1).flatten(1).to(torch.uint8)
    of_offsets = GroupFactors(offsets, group_size) if has_offsets else None
    return CodedWeight(codes, bits, group_size, GroupFactors(scales, group_size), of_offsets)


def _symmetric_factors(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales, and the offsets that follow from them.

    A scale may be negative: codes reach one step further below zero than above it.
    """
    middle = 2 ** (bits - 1)
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))[..., 0]
    scales = _as_half(largest / -middle)
    return scales, -middle * scales


def _range_factors(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets that spread the codes between the smallest and the largest value."""
    offsets = _as_half(groups.amin(dim=2))
    return _as_half((groups.amax(dim=2) - offsets) / (2**bits - 1)), offsets


def _as_half(factors: torch.Tensor) -> torch.Tensor:
    """Round to float16 wherever that is a normal number or zero."""
    sizes = factors.abs()
    is_normal = ((sizes >= MIN_HALF) & (sizes <= MAX_HALF)) | (sizes == 0)
    return torch.where(is_normal, factors.half().float(), factors)
