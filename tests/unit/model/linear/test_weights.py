"""Tests that weight formats dequantise to their definition, and that wrong shapes are refused by name."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from baton.core.errors import BatonError, LayoutMismatch, ModelError
from baton.model.linear.weights import CodedWeight, FloatWeight, GroupFactors


def factors(n: int, groups: int, group_size: int) -> GroupFactors:
    return GroupFactors(torch.rand(n, groups), group_size)


def coded(bits: int = 4, k: int = 64, group_size: int = 32, **fields: object) -> CodedWeight:
    """Return a weight of 3 outputs with random codes."""
    torch.manual_seed(bits)
    codes = torch.randint(0, 2**bits, (3, k), dtype=torch.uint8)
    return CodedWeight(codes, bits, group_size, **{"scales": factors(3, k // group_size, group_size), **fields})  # type: ignore[arg-type]


def test_float_weight_multiplies_blocks_by_their_scale() -> None:
    """The last block of rows and of columns is not full."""
    values, scales = torch.randn(5, 7), torch.rand(3, 3) + 1
    found = FloatWeight(values.to(torch.float8_e4m3fn), scales, (2, 3)).dequantized()
    rounded = values.to(torch.float8_e4m3fn).float()
    for i in range(5):
        for j in range(7):
            assert found[i, j] == rounded[i, j] * scales[i // 2, j // 3]
    assert torch.equal(FloatWeight(values).dequantized(), values)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_symmetric_codes_are_centred(bits: int) -> None:
    weight = coded(bits)
    expected = (weight.codes.numpy().astype(np.float64) - 2 ** (bits - 1)) * np.repeat(
        weight.scales.supers.numpy(), 32, axis=1
    )
    assert np.abs(weight.dequantized().numpy() - expected).max() < 1e-5


def test_offsets_and_two_levels_of_factors() -> None:
    supers, codes = torch.rand(3, 1), torch.randint(-128, 128, (3, 2), dtype=torch.int8)
    minimum = GroupFactors(-torch.rand(3, 2), 32)
    weight = coded(scales=GroupFactors(supers, 64, codes), offsets=minimum)
    assert weight.scales.group_size == 32
    for i in range(3):
        for j in range(64):
            scale = float(supers[i, 0]) * int(codes[i, j // 32])
            expected = scale * int(weight.codes[i, j]) + float(minimum.supers[i, j // 32])
            assert abs(float(weight.dequantized()[i, j]) - expected) < 1e-4


def test_code_values_replace_codes_and_have_no_zero_point() -> None:
    values = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
    weight = coded(code_values=values)
    expected = torch.tensor(values)[weight.codes.long()] * weight.scales.supers.repeat_interleave(32, dim=1)
    assert torch.equal(weight.dequantized(), expected)


def test_bits_per_weight_count_all_factors() -> None:
    assert FloatWeight(torch.zeros(4, 8).bfloat16()).bits_per_weight() == 16
    assert FloatWeight(torch.zeros(4, 8), torch.ones(1, 1), (4, 8)).bits_per_weight() == 33
    assert coded(5).bits_per_weight() == 6
    two_level = GroupFactors(torch.ones(3, 1), 256, torch.ones(3, 8, dtype=torch.uint8))
    assert coded(4, 256, scales=two_level, offsets=two_level).bits_per_weight() == 4 + 2 * (8 / 32 + 32 / 256)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FloatWeight(torch.zeros(2, 2, dtype=torch.int32)), ModelError, "torch.int32; must be one of float32"),
        (lambda: FloatWeight(torch.zeros(2)), LayoutMismatch, "must be a matrix"),
        (lambda: FloatWeight(torch.zeros(4, 4), torch.ones(2, 1), (2, 2)), LayoutMismatch, r"must be \(2, 2\)"),
        (lambda: FloatWeight(torch.zeros(4, 4), torch.ones(2, 2).half(), (2, 2)), ModelError, "must be torch.float32"),
        (lambda: FloatWeight(torch.zeros(4, 4), None, (0, 2)), LayoutMismatch, "at least 1"),
        (lambda: coded(3), ModelError, "codes of 3 bits"),
        (lambda: coded(group_size=48, k=96), ModelError, "groups of 48"),
        (lambda: coded(k=80, scales=factors(3, 2, 32)), LayoutMismatch, "80 inputs are not a multiple"),
        (lambda: coded(scales=factors(3, 4, 16)), LayoutMismatch, "scales are for groups of 16"),
        (lambda: coded(offsets=factors(2, 2, 32)), LayoutMismatch, r"supers of offsets are \(2, 2\)"),
        (
            lambda: CodedWeight(torch.full((1, 32), 16, dtype=torch.uint8), 4, 32, factors(1, 1, 32)),
            ModelError,
            "weight code 16",
        ),
        (lambda: coded(input_order=torch.arange(64)), LayoutMismatch, "input_order is torch.int64"),
        (lambda: coded(input_order=torch.arange(32).int()), LayoutMismatch, "each of 64 inputs once"),
        (lambda: coded(input_order=torch.zeros(64).int()), LayoutMismatch, "each of 64 inputs once"),
        (lambda: coded(input_order=torch.arange(1, 65).int()), LayoutMismatch, "each of 64 inputs once"),
        (lambda: coded(5, code_values=(0,) * 16), ModelError, "16 code_values for codes of 5 bits"),
        (lambda: coded(code_values=(0,) * 15), ModelError, "15 code_values"),
        (lambda: coded(code_values=(*range(15), 128)), ModelError, "code value 128"),
        (lambda: GroupFactors(torch.ones(1, 1), 0), LayoutMismatch, "super_size is 0"),
        (lambda: GroupFactors(torch.ones(1, 1).double(), 32), ModelError, "must be torch.float32"),
        (lambda: GroupFactors(torch.ones(1, 1), 32, torch.ones(1, 1)), ModelError, "must be one of int8, uint8"),
        (
            lambda: GroupFactors(torch.ones(1, 2), 64, torch.ones(1, 3, dtype=torch.int8)),
            LayoutMismatch,
            "do not divide",
        ),
    ],
)
def test_wrong_weights_are_refused_by_name(make: Callable[[], object], error: type[BatonError], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
