"""Compares products with packed weights of every format, on every set of instructions, with float64."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from baton.core.errors import LayoutMismatch
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.packed_linear import LinearPart, PackedGemm
from baton.model.linear.packed_weight import ArenaMemory, pack_weight
from baton.model.linear.product_check import product_problem
from baton.model.linear.weight_packing import PANEL
from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import CodedWeight, FloatWeight, Weight
from tests.scale import sized
from tests.unit.model.linear.weight_samples import CODED_SAMPLES, FLOAT_SAMPLES, coded
from tests.unit.model.native_libraries import library_for, processors

N = 133
"""Outputs: two panels, and five of a third."""
ROW_COUNTS = (*range(1, 14), 97)
"""Every number of rows of a pass, and more rows than a block has."""
FLOAT_INPUTS = sized((258, 1088), (2, 258, 1088, 2306))
GROUPS_OF_INPUTS = sized((384, 512), (128, 384, 640, 1024))
"""Numbers of inputs for coded weights.

128, 384 and 640 fill no whole number of slices of 256; with 384 a slice has two supers.
"""
EPS = 2.0**-24


@pytest.fixture(scope="module", params=processors(), ids=" ".join)
def library(request: pytest.FixtureRequest) -> Path:
    """Compile the kernels for one processor."""
    return library_for(request.param)


@cache
def kernels_of(library: Path) -> Kernels:
    """Return the kernels for one thread; one arena for the weights of all tests."""
    return Kernels(library, 1)


def exact_rows(rows: int, k: int, group_size: int) -> torch.Tensor:
    """Return rows that are integers in 8 bits times a power of two per group, so quantisation keeps them."""
    numbers = torch.randint(-127, 128, (rows, k // group_size, group_size)).float()
    numbers[..., 3] = 127.0
    numbers[0] = 127.0  # the largest integer sums, of both signs
    numbers[1] = -127.0
    return (numbers * 2.0 ** torch.randint(-9, -4, (rows, k // group_size, 1))).reshape(rows, k)


def term_sizes(weight: CodedWeight) -> torch.Tensor:
    """Return the sizes of what is added per weight: scale * code, and the offset if there is one."""
    if weight.offsets is None:
        return weight.dequantized().double().abs()
    offsets = weight.offsets.values().repeat_interleave(weight.group_size, dim=1).double()
    return (weight.dequantized().double() - offsets).abs() + offsets.abs()


def assert_every_row_count_gives_the_same(product: PackedGemm, x: torch.Tensor, found: torch.Tensor) -> None:
    for rows in ROW_COUNTS[:-1]:
        assert torch.equal(product(x[:rows]), found[:rows]), "a row must not depend on the other rows"


@pytest.mark.parametrize("name", list(FLOAT_SAMPLES))
@pytest.mark.parametrize("k", FLOAT_INPUTS)
def test_product_with_floats_equals_float64(library: Path, name: str, k: int) -> None:
    torch.manual_seed(k)
    weight, bias = FLOAT_SAMPLES[name](N, k), torch.randn(N)
    product = PackedGemm(kernels_of(library), LinearPart(weight, bias), dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(ROW_COUNTS[-1], k).to(dtype)
        found = product(x)
        dequantised = weight.dequantized().double()
        expected = x.double() @ dequantised.T + bias.double()
        bound = 2 * k * EPS * (x.double().abs() @ dequantised.T.abs() + bias.double().abs())
        assert ((found.double() - expected).abs() <= bound).all()
        assert_every_row_count_gives_the_same(product, x, found)


def test_every_float8_is_exact(library: Path) -> None:
    """Subnormal numbers and NaN are among them."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    product = PackedGemm(kernels_of(library), LinearPart(FloatWeight(values[:, None])))
    torch.testing.assert_close(product(torch.ones(1, 1))[0], values.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("has_bias", [False, True])
def test_outputs_are_rounded_to_the_nearest_bfloat16(library: Path, has_bias: bool) -> None:
    """Ties, subnormal numbers, infinity and NaN are among them. The last panel is not full."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4 * N,))
    bits[:32] &= 0x7FFFFF  # subnormal
    bits[32:64] = (bits[32:64] & ~0xFFFF) | 0x8000  # ties
    bits[64:66] = torch.tensor([0x7F800000, 0x7FFFFFFF])
    values = bits.int().view(torch.float32)
    weight, bias = (torch.zeros_like(values), values) if has_bias else (values, None)
    product = PackedGemm(kernels_of(library), LinearPart(FloatWeight(weight[:, None]), bias), dtype=torch.bfloat16)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(torch.int16).view(torch.bfloat16)
    expected = torch.where(values.isnan(), torch.nan, rounded.float())
    found = product(torch.ones(7, 1).bfloat16()).float()
    torch.testing.assert_close(found, expected.expand(7, -1), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_take_the_inputs_in_their_own_orders(library: Path, dtype: torch.dtype) -> None:
    """Joined weights may have different orders. Groups consist of the reordered inputs."""
    torch.manual_seed(0)
    k = 384
    orders = [torch.randperm(k).int(), torch.arange(k).flip(0).int()]
    orders = [orders[0], orders[1], orders[0].clone()]
    plain = [coded(bits, size, N, k) for bits, size in ((4, 32), (4, 32), (8, 64))]
    weights = [replace(weight, input_order=order) for weight, order in zip(plain, orders, strict=True)]  # type: ignore[type-var]
    packed = [
        pack_weight(kernels_of(library), each, ArenaMemory(kernels_of(library).weight_arena), dtype) for each in weights
    ]
    product = PackedGemm(kernels_of(library), *(LinearPart(each) for each in packed), dtype=torch.float32)
    x = torch.randn(ROW_COUNTS[-1], k).to(dtype)
    found = product(x).split(N, dim=1)
    for i, order in enumerate(orders):
        single = PackedGemm(kernels_of(library), LinearPart(plain[i]), dtype=torch.float32)
        assert torch.equal(found[i], single(x[:, order.long()]))
        assert torch.equal(weights[i].dequantized()[:, order.long()], plain[i].dequantized())
        assert torch.equal(packed[i].rows(torch.arange(N)), weights[i].dequantized())
        assert product_problem(packed[i], weights[i], dtype) is None
    assert_every_row_count_gives_the_same(product, x, torch.cat(found, dim=1))


@pytest.mark.parametrize("name", list(CODED_SAMPLES))
@pytest.mark.parametrize("k", GROUPS_OF_INPUTS)
def test_product_with_codes_equals_float64(library: Path, name: str, k: int) -> None:
    """Quantisation changes neither of these rows, so only float's own rounding is left."""
    torch.manual_seed(k)
    weight, bias = CODED_SAMPLES[name](N, k), torch.randn(N)
    assert isinstance(weight, CodedWeight)
    product = PackedGemm(kernels_of(library), LinearPart(weight, bias), dtype=torch.float32)
    x = exact_rows(ROW_COUNTS[-1], k, weight.group_size)
    found = product(x)
    expected = x.double() @ weight.dequantized().double().T + bias.double()
    sizes = x.double().abs() @ term_sizes(weight).T + bias.double().abs()
    bound = (2 * k / weight.group_size + 6) * EPS * sizes
    assert ((found.double() - expected).abs() <= bound).all()
    assert_every_row_count_gives_the_same(product, x, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["4 bits of 32, offsets", "as Q6_K", "8 bits of 128"])
def test_any_rows_are_rounded_to_8_bits_at_most(library: Path, name: str, dtype: torch.dtype) -> None:
    """The error of an input is at most half a step, a 254th of the largest input of its group."""
    torch.manual_seed(0)
    k = 384
    weight = CODED_SAMPLES[name](N, k)
    assert isinstance(weight, CodedWeight)
    x = (torch.randn(20, k) * torch.rand(20, k) ** 4).to(dtype)
    x[3] = 0
    found = PackedGemm(kernels_of(library), LinearPart(weight), dtype=torch.float32)(x)
    largest = x.double().abs().view(20, -1, weight.group_size).amax(dim=2)
    steps = largest.repeat_interleave(weight.group_size, dim=1) / 127
    bound = (0.5001 * steps) @ weight.dequantized().double().abs().T + 1e-5 * (x.double().abs() @ term_sizes(weight).T)
    expected = x.double() @ weight.dequantized().double().T
    assert ((found.double() - expected).abs() <= bound).all()
    assert not found[3].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["bfloat16", "4 bits of 32", "as Q6_K"])
def test_rows_that_are_not_finite_give_outputs_that_are_not(library: Path, name: str, value: float) -> None:
    """Other rows are not affected."""
    torch.manual_seed(0)
    weight = {**FLOAT_SAMPLES, **CODED_SAMPLES}[name](N, 384)
    product = PackedGemm(kernels_of(library), LinearPart(weight))
    x = torch.randn(9, 384).bfloat16()
    right = product(x)
    x[4, 200] = value
    found = product(x)
    assert not found[4].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], right[[0, 1, 2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("num_rows", [1, 7, 100])
def test_modules_of_different_formats_are_joined(library: Path, num_rows: int) -> None:
    torch.manual_seed(0)
    k, samples = 384, {**FLOAT_SAMPLES, **CODED_SAMPLES}
    names = ("4 bits of 32, offsets", "as Q6_K", "bfloat16", "4 bits of 32", "float32", "float8")
    parts = [
        LinearPart(samples.get(name, FLOAT_SAMPLES["float8_e4m3fn"])(n, k), torch.randn(n) if n % 2 else None)
        for n, name in zip((70, 5, 64, 129, 2, 33), names, strict=True)
    ]
    x = torch.randn(num_rows, k).bfloat16()
    joined = PackedGemm(Kernels(library, 3), *parts)
    expected = torch.cat([PackedGemm(kernels_of(library), part)(x) for part in parts], dim=1)
    assert torch.equal(joined(x), expected)
    assert (joined.n, joined.k) == (303, k)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", ["bfloat16", "4 bits of 32", "as Q6_K"])
def test_every_panel_of_a_long_weight_is_multiplied_once(library: Path, name: str, num_threads: int) -> None:
    """For few rows, threads take several adjacent panels at a time. 25 panels are no whole number of runs."""
    torch.manual_seed(0)
    weight = {**FLOAT_SAMPLES, **CODED_SAMPLES}[name](24 * PANEL + 5, 256)
    whole = PackedGemm(Kernels(library, num_threads), LinearPart(weight))
    begins = range(0, weight.shape[0], PANEL)
    parts = [LinearPart(take_rows(weight, slice(begin, begin + PANEL))) for begin in begins]
    x = torch.randn(7, 256).bfloat16()
    expected = torch.cat([PackedGemm(kernels_of(library), part)(x) for part in parts], dim=1)
    for rows in (1, 6, 7):
        assert torch.equal(whole(x[:rows]), expected[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_rounded_to_the_dtype_of_x(library: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = coded(4, 32, N, 384)
    x = torch.randn(3, 5, 384).to(dtype)
    rounded = PackedGemm(kernels_of(library), LinearPart(weight))(x)
    exact = PackedGemm(kernels_of(library), LinearPart(weight), dtype=torch.float32)(x)
    assert torch.equal(rounded, exact.to(dtype))
    assert rounded.shape == (3, 5, N)
    assert PackedGemm(kernels_of(library), LinearPart(weight))(x[:0]).shape == (0, 5, N)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bfloat16", 16),
        ("float8, blocks of 128", 8 + 32 / 128),
        ("8 bits of 32", 8 + 16 / 32),
        ("4 bits of 32", 4 + 16 / 32),
        ("4 bits of 32, offsets", 4 + 2 * 16 / 32),
        ("4 bits, float scales", 4 + 32 / 32),
        ("as Q4_K", 4 + 2 * (8 / 32 + 16 / 256)),
        ("as Q5_K", 5 + 2 * (8 / 32 + 16 / 256)),
        ("as Q6_K", 6 + 8 / 16 + 16 / 256),
        ("mxfp4", 4 + 32 / 32),
        ("uneven values", 8 + 16 / 32),
    ],
)
def test_packed_size_is_that_of_codes_and_factors(name: str, bits: float) -> None:
    """Bytes read per weight decide the speed of decodes."""
    n, k = 128, 512
    weight: Weight = {**FLOAT_SAMPLES, **CODED_SAMPLES}[name](n, k)
    product = PackedGemm(kernels_of(library_for(processors()[0])), LinearPart(weight))
    assert product.num_bytes * 8 == bits * n * k


def test_wrong_inputs_are_refused() -> None:
    kernels = kernels_of(library_for(processors()[0]))
    parts = [LinearPart(FloatWeight(torch.zeros(2, k))) for k in (4, 6)]
    with pytest.raises(LayoutMismatch, match="cannot be joined"):
        PackedGemm(kernels, *parts)
    with pytest.raises(LayoutMismatch, match="x has 5 inputs; the product has 4"):
        PackedGemm(kernels, parts[0])(torch.zeros(1, 5))
