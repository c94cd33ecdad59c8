"""Measures products with packed weights of each format, as the share of the rate of reading memory.

As many copies of a weight are multiplied in turn as exceed the processor's caches, because a decode step
reads all weights of a model once. The rate of reading is that of the same threads for a buffer of the same
size. "Times bfloat16" compares one row with bfloat16, measured in alternation. Several rows are multiplied
with one copy, which stays in the cache if it fits.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.linear.packed_linear import LinearPart, PackedGemm
from baton.model.linear.quantise import quantise
from baton.model.linear.weights import CodedWeight, FloatWeight, GroupFactors, Weight
from bench.support.fp8_checkpoint import BLOCK, to_fp8
from bench.support.roofline import read_s

SHAPES = ((512, 3072), (1024, 6144), (640, 262_144))
"""Inputs and outputs: the largest product of a 42M and a 0.6B model, and the output layer of Gemma 3 270M."""
TOTAL_BYTES = 2**30
"""Bytes of all copies of a weight together: several times what caches hold."""
ROWS = (1, 8, 512)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def two_level(weight: torch.Tensor, bits: int, group_size: int, *, has_offsets: bool) -> CodedWeight:
    """Return random codes with two levels of factors, as in GGUF, in the shape of `weight`."""
    n, k = weight.shape
    size = 256 if k % 256 == 0 else 128
    factors = GroupFactors(torch.ones(n, k // size), size, torch.ones(n, k // group_size, dtype=torch.int8))
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    return CodedWeight(codes, bits, group_size, factors, factors if has_offsets else None)


def mxfp4(weight: torch.Tensor) -> CodedWeight:
    """Return random codes of mxfp4 in the shape of `weight`."""
    n, k = weight.shape
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return CodedWeight(codes, 4, 32, GroupFactors(torch.ones(n, k // 32), 32), code_values=MXFP4_VALUES)


FORMATS: Mapping[str, Callable[[torch.Tensor], Weight]] = {
    "bfloat16": lambda weight: FloatWeight(weight.bfloat16()),
    "float32": FloatWeight,
    "float16": lambda weight: FloatWeight(weight.half()),
    "float8 of 128 x 128": lambda weight: FloatWeight(*to_fp8(weight), (BLOCK, BLOCK)),
    "int8 of 32": lambda weight: quantise(weight, 8, 32),
    "int8 of 64": lambda weight: quantise(weight, 8, 64),  # --weights int8
    "int8 of 128": lambda weight: quantise(weight, 8, 128),
    "int4 of 32": lambda weight: quantise(weight, 4, 32),  # --weights int4
    "int4 of 128": lambda weight: quantise(weight, 4, 128),
    "int4 of 32, offsets": lambda weight: quantise(weight, 4, 32, has_offsets=True),
    "as Q4_K": partial(two_level, bits=4, group_size=32, has_offsets=True),
    "as Q5_K": partial(two_level, bits=5, group_size=32, has_offsets=True),
    "as Q6_K": partial(two_level, bits=6, group_size=16, has_offsets=False),
    "mxfp4": mxfp4,
}
"""Makes a weight of each format from float32 [n, k]."""

Measure = Callable[[tuple[Callable[[], object], ...], int], list[float]]
"""Returns the median seconds per call of each function, over a number of repeats."""

HEADER = ["inputs x outputs", "format", "bits", "GB/s, 1 row", "of reading", "times bfloat16"] + [
    f"{rows} rows" for rows in ROWS[1:]
]


def copies(weight: Weight, num_threads: int) -> list[PackedGemm]:
    """Return `TOTAL_BYTES` of copies of a weight, at least one."""
    kernels = load_kernels(num_threads)  # with its own arena, which is freed with the weights
    first = PackedGemm(kernels, LinearPart(weight))
    return [first, *(PackedGemm(kernels, LinearPart(weight)) for _ in range(TOTAL_BYTES // first.num_bytes - 1))]


def multiply_all(products: list[PackedGemm], x: torch.Tensor) -> None:
    """Multiply `x` with each copy of a weight."""
    for product in products:
        product(x)


def format_rows(num_threads: int, repeats: int, measure: Measure) -> list[list[str]]:
    """Return the table rows, one per shape and format. The last columns are for one copy of the weight."""
    rows = []
    for k, n in SHAPES:
        plain = copies(FORMATS["bfloat16"](0.02 * torch.randn(n, k)), num_threads)
        for name, make in FORMATS.items():
            products = copies(make(0.02 * torch.randn(n, k)), num_threads)
            one_row, *xs = (torch.randn(num_rows, k).bfloat16() for num_rows in ROWS)
            plain_s, all_s, *more_s = measure(
                (
                    partial(multiply_all, plain, one_row),
                    partial(multiply_all, products, one_row),
                    *(partial(products[0], x) for x in xs),
                ),
                repeats,
            )
            num_bytes = products[0].num_bytes
            total_bytes, one_s = len(products) * num_bytes, all_s / len(products)
            rows.append(
                [
                    f"{k} x {n}",
                    name,
                    f"{8 * num_bytes / (n * k):.2f}",
                    f"{num_bytes / one_s / 1e9:.1f}",
                    f"{read_s(total_bytes) / all_s:.0%}",
                    f"{plain_s / len(plain) / one_s:.2f}",
                    *(f"{taken * 1e6:.0f} us" for taken in more_s),
                ]
            )
    return rows
