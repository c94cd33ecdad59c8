"""Compares the unpacked tensor types of GGUF with transformers' own dequantisation, bit for bit."""

import numpy as np
import pytest
import torch
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import CodedWeight, FloatWeight
from baton.model.loading.gguf.block_formats import BLOCK_FORMATS, MXFP4_VALUES
from baton.model.loading.gguf.gguf_types import CHUNK_VALUES, block_shape, dtype_of, is_dequantised, weight_of
from tests.unit.model.loading.gguf_models import random_blocks

NAMES = {block.name: number for number, block in BLOCK_FORMATS.items()}
BITS = {"Q4_0": 4.5, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "Q8_0": 8.5}
"""Bits of a weight in the file."""


def blocks_of(type_id: int, rows: int = 7, columns: int = 512) -> torch.Tensor:
    """Return random blocks, of all bit patterns but infinite factors."""
    return torch.from_numpy(random_blocks(type_id, rows, columns, seed=type_id))


@pytest.mark.parametrize("name", [name for name in NAMES if NAMES[name] in GGML_BLOCK])
def test_type_is_unpacked_without_loss(name: str) -> None:
    raw = blocks_of(NAMES[name])
    weight = weight_of(raw.view(-1), NAMES[name], 7, 512)
    assert isinstance(weight, CodedWeight)
    assert torch.equal(weight.dequantized(), dequantize(raw, NAMES[name]).view(7, 512))


@pytest.mark.parametrize("name", BITS)
def test_codes_and_factors_take_little_more_than_the_file(name: str) -> None:
    """Factors are float32 here and float16 in the file."""
    weight = weight_of(blocks_of(NAMES[name]).view(-1), NAMES[name], 7, 512)
    assert BITS[name] <= weight.bits_per_weight() <= BITS[name] + 0.5


def five_bits(raw: np.ndarray, begin: int) -> np.ndarray:
    """Return the 32 codes of a block of Q5_0 or Q5_1, by the loops of ggml."""
    high = int.from_bytes(raw[begin : begin + 4].tobytes(), "little")
    low = raw[begin + 4 :]
    first = [(low[j] & 15) | ((high >> j) & 1) << 4 for j in range(16)]
    return np.array(first + [(low[j] >> 4) | ((high >> (j + 16)) & 1) << 4 for j in range(16)], np.float64)


def test_types_that_transformers_does_not_unpack() -> None:
    """Q5_0, Q5_1 and MXFP4 follow their definitions, computed here value by value."""
    for name in ("Q5_0", "Q5_1", "MXFP4"):
        raw = blocks_of(NAMES[name], 2, 64)
        found = weight_of(raw.view(-1), NAMES[name], 2, 64).dequantized().view(-1, 32).numpy()
        for block, values in zip(raw.view(-1, BLOCK_FORMATS[NAMES[name]].num_bytes).numpy(), found, strict=True):
            halves = block[:4].copy().view(np.float16).astype(np.float64)
            if name == "Q5_0":
                expected = halves[0] * (five_bits(block, 2) - 16)
            elif name == "Q5_1":
                expected = halves[0] * five_bits(block, 4) + halves[1]
            else:
                codes = [*(block[1:] & 15), *(block[1:] >> 4)]
                expected = np.array([MXFP4_VALUES[code] / 2 for code in codes]) * 2.0 ** (int(block[0]) - 127)
            assert np.allclose(values, expected, rtol=1e-6, atol=1e-9)


def test_mxfp4_values_are_twice_those_of_e2m1() -> None:
    """E2M1: a sign, two bits of exponent with a bias of 1, one bit of mantissa."""
    for code, value in enumerate(MXFP4_VALUES):
        exponent, mantissa = (code >> 1) & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert value == (-2 if code & 8 else 2) * size


def test_rare_type_becomes_bfloat16() -> None:
    rare = 18  # IQ3_XXS
    num_values, num_bytes = block_shape(rare) or (0, 0)
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (3, num_bytes), dtype=np.uint8))
    raw[:, :2] = torch.tensor([0, 60], dtype=torch.uint8)  # a factor of 1
    weight = weight_of(raw.view(-1), rare, 3, num_values)
    assert is_dequantised(rare)
    assert isinstance(weight, FloatWeight)
    assert torch.equal(weight.values, dequantize(raw, rare).view(3, num_values).bfloat16())


def test_large_tensors_are_unpacked_in_chunks() -> None:
    rows = CHUNK_VALUES // 4096 + 3
    raw = blocks_of(NAMES["Q6_K"], 4, 4096).repeat(-(-rows // 4), 1)[:rows].contiguous()
    weight = weight_of(raw.view(-1), NAMES["Q6_K"], rows, 4096)
    last = take_rows(weight, slice(rows - 4, rows)).dequantized()
    assert torch.equal(last, dequantize(raw[-4:], NAMES["Q6_K"]).view(4, 4096))


@pytest.mark.parametrize(
    ("types", "dtype"), [([0], "float32"), ([0, 1], "float16"), ([0, 30], "bfloat16"), ([0, 1, 12], "bfloat16")]
)
def test_dtype_of_a_file(types: list[int], dtype: str) -> None:
    assert dtype_of(types) == dtype


def test_rows_of_weights() -> None:
    """Rows of a coded weight, and of floats with scales of blocks, are those of the dequantised one."""
    order = torch.tensor([5, 0, 0, 3])
    blocks = FloatWeight(torch.randn(7, 12), torch.rand(3, 4), (3, 3))
    for weight in (weight_of(blocks_of(NAMES["Q4_K"]).view(-1), NAMES["Q4_K"], 7, 512), blocks):
        assert torch.equal(take_rows(weight, order).dequantized(), weight.dequantized()[order])
        assert torch.equal(take_rows(weight, slice(2, 5)).dequantized(), weight.dequantized()[2:5])
