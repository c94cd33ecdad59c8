"""Tests that packed weights are read back bit for bit, and that modules with them take any input."""

import ctypes

import pytest
import torch
from torch import nn

from baton.model.kernels.cpu.kernel_library import Kernels, WeightArena
from baton.model.linear import product_check
from baton.model.linear.embedding import WeightEmbedding
from baton.model.linear.linear import Linear, reference_product
from baton.model.linear.packed_linear import LinearPart, PackedGemm
from baton.model.linear.packed_weight import ArenaMemory, PackedWeight, pack_weight
from baton.model.linear.product_check import product_problem, shape_class
from baton.model.linear.quantise import quantise
from baton.model.linear.weight_packing import packed_bits
from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import FloatWeight, Weight
from tests.unit.model.linear.test_packed_linear import kernels_of
from tests.unit.model.linear.weight_samples import CODED_SAMPLES, FLOAT_SAMPLES
from tests.unit.model.native_libraries import library_for, processors

SAMPLES = {**FLOAT_SAMPLES, **CODED_SAMPLES}


def kernels() -> Kernels:
    return kernels_of(library_for(processors()[0]))


def packed(weight: Weight, dtype: torch.dtype = torch.float32) -> PackedWeight:
    return pack_weight(kernels(), weight, ArenaMemory(WeightArena(1024)), dtype)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_rows_are_read_back_bit_for_bit(name: str) -> None:
    """The number of inputs fills no whole number of slices, and the last panel is not full."""
    torch.manual_seed(0)
    weight = SAMPLES[name](133, 640)
    outputs = torch.tensor([132, 0, 64, 63, 5, 5, 128])
    found, right = packed(weight).rows(outputs), weight.dequantized()[outputs]
    torch.testing.assert_close(found, right, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["bfloat16", "as Q4_K", "mxfp4", "float8, blocks of 128", "uneven values"])
def test_packed_bits_are_those_in_memory(name: str) -> None:
    weight = SAMPLES[name](128, 512)
    assert packed(weight).num_bytes * 8 == packed_bits(weight) * 128 * 512


def test_rows_beyond_the_last_are_refused() -> None:
    weight = packed(FloatWeight(torch.randn(65, 32)))
    for outputs in ([65], [-1]):
        with pytest.raises(IndexError, match="must be below 65"):
            weight.rows(torch.tensor(outputs))
    assert weight.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_linear_layer_takes_inputs_of_any_dtype_and_stride(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = FloatWeight(torch.randn(70, 48)), torch.randn(70)
    module, own = Linear(packed(weight), bias), nn.Linear(48, 70)
    own.weight.data, own.bias.data = weight.values, bias
    x = torch.randn(3, 96, 5).to(dtype)
    for each in (x.transpose(1, 2)[..., ::2], x[0].T[:, :48], x[:, :48, 0], x[:0, :48, 0], x[0, :48, 0]):
        found = module(each)
        assert (found.dtype, found.shape) == (dtype, (*each.shape[:-1], 70))
        torch.testing.assert_close(found.float(), own(each.float()), atol=0.05, rtol=0.01)


def test_a_bias_may_be_given_after_the_layer_was_made() -> None:
    module = Linear(packed(FloatWeight(torch.eye(4))), torch.empty(4, device="meta"))
    module.bias = nn.Parameter(torch.arange(4.0), requires_grad=False)
    assert torch.equal(module(torch.ones(1, 4)), torch.tensor([[1.0, 2.0, 3.0, 4.0]]))


def test_the_reference_product_takes_packed_weights() -> None:
    weight, x = quantise(torch.randn(70, 64), 4, 32), torch.randn(3, 64)
    assert torch.equal(reference_product(x, packed(weight)), reference_product(x, weight))
    assert torch.equal(take_rows(packed(weight), slice(3, 9)).dequantized(), weight.dequantized()[3:9])


@pytest.mark.parametrize("padding_idx", [None, 40])
def test_an_embedding_looks_up_packed_rows(padding_idx: int | None) -> None:
    """The padding token may be beyond the number of tokens of a call."""
    weight = quantise(torch.randn(48, 64), 8, 32)
    module = WeightEmbedding(packed(weight), nn.Embedding(48, 64, padding_idx), torch.bfloat16)
    tokens = torch.tensor([[40, 3], [3, 47]])
    assert torch.equal(module(tokens), weight.dequantized().bfloat16()[tokens])


@pytest.mark.parametrize("name", list(SAMPLES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_product_is_found_right(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = SAMPLES[name](1000, 384)
    assert product_problem(packed(weight, dtype), weight, dtype) is None


@pytest.mark.parametrize("n", [1, 64, 65, 700])
def test_a_check_covers_both_ends(n: int) -> None:
    begins = product_check._panel_begins(n)
    assert (begins[0], begins[-1]) == (0, (n - 1) // 64 * 64)
    assert begins == sorted(set(begins))
    assert len(begins) <= product_check.CHECKED_PANELS


def test_a_damaged_weight_is_found() -> None:
    weight = quantise(torch.randn(130, 64), 4, 32)
    damaged = packed(weight)
    ctypes.c_uint8.from_address(damaged.memory.address).value ^= 1
    assert "outputs 0 to 64 were packed with other values" in (product_problem(damaged, weight, torch.float32) or "")
    assert product_problem(damaged, None, torch.float32) is None, "the product itself is right"


@pytest.mark.parametrize("num_inputs", [64, 8192])
def test_a_product_that_leaves_out_an_input_is_found(num_inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)

    class WithoutLast(PackedGemm):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x[..., -1] = 0
            return super().__call__(x)

    monkeypatch.setattr(product_check, "PackedGemm", WithoutLast)
    weight = FloatWeight(torch.randn(64, num_inputs))
    assert "differ by" in (product_problem(packed(weight), weight, torch.float32) or "")


def test_shape_classes_differ_where_the_kernels_do() -> None:
    weights = [packed(FloatWeight(torch.randn(n, k))) for n, k in ((64, 32), (65, 32), (128, 32), (64, 33))]
    classes = {shape_class(weight, torch.float32) for weight in weights}
    assert len(classes) == 3
    assert shape_class(weights[0], torch.bfloat16) not in classes
    assert shape_class(packed(FloatWeight(torch.randn(64, 32).bfloat16())), torch.float32) not in classes


def test_joined_weights_share_what_is_packed() -> None:
    parts = [packed(FloatWeight(torch.randn(n, 32))) for n in (3, 70)]
    x = torch.randn(2, 32)
    joined = PackedGemm(kernels(), *(LinearPart(part) for part in parts))
    assert torch.equal(joined(x), torch.cat([Linear(part)(x) for part in parts], dim=1))
    assert joined.num_bytes == sum(part.num_bytes for part in parts)
