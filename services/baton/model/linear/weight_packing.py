"""Decides how a weight is packed for the C++ products, without loss.

Factors become float16 if all of them are exact in it. Weights that no packed format fits are expanded:

- scaled floats other than float8, and float8 with scale blocks of odd sizes, to float32;
- code values that are far apart to 8-bit codes;
- two levels of factors, whose supers do not fit a slice of 256 inputs, to one level.
"""

import ctypes
from dataclasses import dataclass

import torch

from baton.model.kernels.cpu.gemm_args import FactorFormat, WeightFormat
from baton.model.kernels.cpu.kernel_args import DTYPES
from baton.model.linear.weights import CodedWeight, FloatWeight, GroupFactors, Weight

FLOAT8, CODED = 3, 4
"""Kinds of weight_format.h beside those of `DTYPES`."""
FACTOR_CODES = {torch.int8: 1, torch.uint8: 2}
"""`FactorCodes` of weight_format.h."""
PANEL = 64
"""Outputs of a panel; `PANEL` of weight_format.h. The last panel is filled up with zeros."""
SLICE_INPUTS = 256
"""`CODED_SLICE` of weight_format.h."""
MIN_SCALE_INPUTS = 16
"""Fewest inputs per scale of packed float8; `UNIT` of weight_format.h."""
FACTOR_BYTES = {DTYPES[torch.float32]: 4, DTYPES[torch.float16]: 2}
"""Bytes of a factor by the code of its dtype."""
MAX_TABLE_VALUE = 31
"""Largest value of a packed code table, counted from its smallest; as in weight_format.h."""


@dataclass(frozen=True, slots=True)
class FactorSource:
    """Factors as they are packed. Supers are float32 whatever `format` says."""

    format: FactorFormat
    supers: torch.Tensor | None = None
    codes: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackingSource:
    """A weight in the layout that the C++ packer reads."""

    format: WeightFormat
    values: torch.Tensor
    scales: FactorSource = FactorSource(FactorFormat())
    offsets: FactorSource = FactorSource(FactorFormat())


def packing_source(weight: Weight) -> PackingSource:
    """Return a weight as the C++ packer reads it, and the format that it gets."""
    return _float_source(weight) if isinstance(weight, FloatWeight) else _coded_source(weight)


def packed_bits(weight: Weight) -> float:
    """Return the bits that one weight takes when packed, factors included."""
    source = packing_source(weight)
    bits = source.format.bits if source.format.kind == CODED else 8 * source.values.itemsize
    group_size = source.format.group_size or SLICE_INPUTS
    for factors in (source.format.scales, source.format.offsets):
        if factors.super_size:
            bits += 8 * FACTOR_BYTES[factors.super_dtype] / min(factors.super_size, SLICE_INPUTS)
            bits += 8 / group_size if factors.codes else 0
    return bits


def _float_source(weight: FloatWeight) -> PackingSource:
    values = weight.values.detach()
    if values.dtype == torch.float8_e4m3fn:
        if weight.scales is None:
            return PackingSource(WeightFormat(kind=FLOAT8), values.contiguous())
        if inputs := _inputs_per_scale(weight.scale_block[1], weight.shape[1]):
            return _float8_source(weight, weight.scales, inputs)
    if weight.scales is not None or (values.dtype == torch.bfloat16 and weight.shape[1] % 2):
        values = weight.dequantized()
    return PackingSource(WeightFormat(kind=DTYPES[values.dtype]), values.contiguous())


def _inputs_per_scale(block: int, k: int) -> int | None:
    """Return the inputs per packed scale of float8 whose scales have `block` inputs; None if no size fits."""
    if block >= k:
        return SLICE_INPUTS
    sizes = (SLICE_INPUTS >> shift for shift in range(SLICE_INPUTS.bit_length()))
    return next((size for size in sizes if size >= MIN_SCALE_INPUTS and block % size == 0), None)


def _float8_source(weight: FloatWeight, scales: torch.Tensor, inputs: int) -> PackingSource:
    n, k = weight.shape
    rows, columns = weight.scale_block
    supers = scales[torch.arange(n) // rows][:, torch.arange(0, k, inputs) // columns].contiguous()
    factors = FactorSource(FactorFormat(inputs, _super_dtype(supers), 0), supers)
    return PackingSource(WeightFormat(kind=FLOAT8, scales=factors.format), weight.values.detach().contiguous(), factors)


def _coded_source(weight: CodedWeight) -> PackingSource:
    scales = _factors(weight.scales)
    offsets = FactorSource(FactorFormat()) if weight.offsets is None else _factors(weight.offsets)
    codes, bits = weight.codes, weight.bits
    zero_point = 0 if weight.offsets is not None else 1 << (bits - 1)
    table: list[int] = []
    if weight.code_values is not None:
        zero_point = -min(weight.code_values)
        table = [value + zero_point for value in weight.code_values]
        if max(table) > MAX_TABLE_VALUE:
            codes, bits, table = torch.tensor(table, dtype=torch.uint8)[codes.int()], 8, []
    packed = WeightFormat(
        kind=CODED,
        bits=bits,
        group_size=weight.group_size,
        zero_point=zero_point,
        scales=scales.format,
        offsets=offsets.format,
        has_table=bool(table),
        table=(ctypes.c_uint8 * 16)(*table),
    )
    return PackingSource(packed, codes.contiguous(), scales, offsets)


def _factors(factors: GroupFactors) -> FactorSource:
    supers, size, codes = factors.supers, factors.super_size, factors.codes
    if codes is not None and SLICE_INPUTS % size and size % SLICE_INPUTS:
        size, supers, codes = size * supers.shape[1] // codes.shape[1], factors.values(), None
    kind = 0 if codes is None else FACTOR_CODES[codes.dtype]
    packed = FactorFormat(size, _super_dtype(supers), kind)
    return FactorSource(packed, supers.contiguous(), None if codes is None else codes.contiguous())


def _super_dtype(supers: torch.Tensor) -> int:
    """Return the code of float16 if it holds all of `supers` exactly, else of float32."""
    return DTYPES[torch.float16 if torch.equal(supers.half().float(), supers) else torch.float32]
