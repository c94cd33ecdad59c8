"""Selects rows of a weight. A row's codes and factors belong to it alone, so nothing is rounded."""

import torch

from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weights import CodedWeight, FloatWeight, GroupFactors, Weight


def take_rows(weight: Weight | PackedWeight, rows: torch.Tensor | slice) -> Weight:
    """Return a weight of some rows, in the given order.

    A slice shares memory with `weight`, unless that is packed.

    rows: int64 [number of rows], or a slice of step 1.
    """
    if isinstance(weight, PackedWeight):
        return FloatWeight(weight.rows(torch.arange(weight.shape[0])[rows] if isinstance(rows, slice) else rows))
    if isinstance(weight, CodedWeight):
        return CodedWeight(
            weight.codes[rows],
            weight.bits,
            weight.group_size,
            _factor_rows(weight.scales, rows),
            None if weight.offsets is None else _factor_rows(weight.offsets, rows),
            weight.code_values,
            weight.input_order,
        )
    if weight.scales is None:
        return FloatWeight(weight.values[rows])
    block_rows, block_columns = weight.scale_block
    if block_rows > 1:
        numbers = torch.arange(len(weight.values), device=weight.values.device)[rows]
        return FloatWeight(weight.values[rows], weight.scales[numbers // block_rows], (1, block_columns))
    return FloatWeight(weight.values[rows], weight.scales[rows], weight.scale_block)


def _factor_rows(factors: GroupFactors, rows: torch.Tensor | slice) -> GroupFactors:
    codes = None if factors.codes is None else factors.codes[rows]
    return GroupFactors(factors.supers[rows], factors.super_size, codes)
