"""Tests that rounded weights are as near as their codes allow, and are packed in few bits."""

import pytest
import torch

from baton.core.errors import LayoutMismatch, ModelError
from baton.model.linear.packed_linear import LinearPart, PackedGemm
from baton.model.linear.quantise import quantise
from tests.unit.model.linear.test_packed_linear import kernels_of
from tests.unit.model.native_libraries import library_for, processors


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("group_size", [16, 128])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6], ids="size {}".format)
def test_no_value_is_further_away_than_half_a_step(bits: int, has_offsets: bool, group_size: int, size: float) -> None:
    """Symmetric codes end one step earlier on one side; there it may be a whole step."""
    torch.manual_seed(0)
    weight = size * torch.randn(9, 256)
    found = quantise(weight, bits, group_size, has_offsets=has_offsets)
    groups = weight.view(9, -1, group_size)
    largest = groups.abs().amax(dim=2)
    steps = found.scales.values().abs()
    allowed = (0.5 if has_offsets else 1.0) * steps + 2**-10 * largest  # factors have 11 bits
    error = (found.dequantized() - weight).abs().view(9, -1, group_size)
    assert (error <= allowed[..., None]).all()
    span = groups.amax(dim=2) - groups.amin(dim=2)
    finest = span / (2**bits - 1) if has_offsets else largest / 2 ** (bits - 1)
    assert (steps <= 1.001 * finest + 2**-10 * largest).all()


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_constants_stay_exact(bits: int, has_offsets: bool) -> None:
    weight = torch.zeros(3, 64)
    weight[1], weight[2] = 0.5, -0.25
    assert torch.equal(quantise(weight, bits, 32, has_offsets=has_offsets).dequantized(), weight)


def test_many_outputs_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(10, 32)
    whole = quantise(weight, 4, 32)
    monkeypatch.setattr("baton.model.linear.quantise.ROWS_AT_A_TIME", 3)
    assert torch.equal(quantise(weight, 4, 32).dequantized(), whole.dequantized())


def test_wrong_sizes_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="bits is 3"):
        quantise(torch.zeros(1, 32), 3, 32)
    with pytest.raises(ModelError, match="group_size is 48"):
        quantise(torch.zeros(1, 48), 4, 48)
    with pytest.raises(LayoutMismatch, match="40 inputs"):
        quantise(torch.zeros(1, 40), 4, 32)


@pytest.mark.parametrize(("bits", "has_offsets", "packed_bits"), [(8, False, 8.5), (4, False, 4.5), (4, True, 5.0)])
def test_factors_are_packed_in_16_bits(bits: int, has_offsets: bool, packed_bits: float) -> None:
    weight = quantise(0.02 * torch.randn(64, 256).bfloat16(), bits, 32, has_offsets=has_offsets)
    product = PackedGemm(kernels_of(library_for(processors()[0])), LinearPart(weight))
    assert product.num_bytes * 8 == packed_bits * 64 * 256
