"""Random weights of every format that can be packed, by name."""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from baton.model.linear.weights import CodedWeight, FloatWeight, GroupFactors, Weight

MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of mxfp4's codes, so that they are integers."""
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values too far apart for a packed table: they are packed as 8-bit codes."""


def floats(dtype: torch.dtype, n: int, k: int) -> Weight:
    return FloatWeight(torch.randn(n, k).to(dtype))


def scaled(dtype: torch.dtype, rows: int, columns: int, n: int, k: int) -> Weight:
    scales = torch.rand(-(-n // rows), -(-k // columns)) + 0.5
    return FloatWeight(torch.randn(n, k).to(dtype), scales, (rows, columns))


def one_level(n: int, k: int, group_size: int, *, is_half: bool, sign: int = 1) -> GroupFactors:
    supers = sign * (torch.rand(n, k // group_size) + 0.25)
    return GroupFactors(supers.half().float() if is_half else supers, group_size)


def two_level(n: int, k: int, group_size: int, super_size: int, dtype: torch.dtype, sign: int = 1) -> GroupFactors:
    """Return factors whose supers are float16, as those of GGUF; of half the size if k is not a multiple."""
    size = super_size if k % super_size == 0 else super_size // 2
    low, high = (-128, 128) if dtype == torch.int8 else (0, 64)
    codes = torch.randint(low, high, (n, k // group_size)).to(dtype)
    return GroupFactors(sign * ((torch.rand(n, k // size) + 0.25) / 64).half().float(), size, codes)


def coded(
    bits: int,
    group_size: int,
    n: int,
    k: int,
    *,
    factors: str = "half",
    has_offsets: bool = False,
    code_values: tuple[int, ...] | None = None,
) -> Weight:
    """Return a weight of random codes. `factors`: one of those below."""
    make = {
        "half": partial(one_level, n, k, group_size, is_half=True),
        "float": partial(one_level, n, k, group_size, is_half=False),
        "signed": partial(two_level, n, k, group_size, 256, torch.int8),
        "unsigned": partial(two_level, n, k, group_size, 256, torch.uint8),
        "one super": partial(two_level, n, k, group_size, k, torch.int8),
        "odd supers": partial(two_level, n, k, group_size, 3 * group_size if k % 3 == 0 else k, torch.uint8),
    }[factors]
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    codes[:, : min(k, 2 * group_size)] = 2**bits - 1  # the largest integer sums
    offsets = make(sign=-1) if has_offsets else None
    return CodedWeight(codes, bits, group_size, make(), offsets, code_values)


FLOAT_SAMPLES: Mapping[str, Callable[[int, int], Weight]] = {
    **{
        str(dtype).removeprefix("torch."): partial(floats, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    },
    "float8, scale per output": partial(scaled, torch.float8_e4m3fn, 1, 1 << 20),
    "float8, blocks of 128": partial(scaled, torch.float8_e4m3fn, 128, 128),
    "float8, blocks of 3 x 48": partial(scaled, torch.float8_e4m3fn, 3, 48),
    "float8, blocks of 8 inputs": partial(scaled, torch.float8_e4m3fn, 1, 8),
    "bfloat16, scaled": partial(scaled, torch.bfloat16, 2, 10),
}
CODED_SAMPLES: Mapping[str, Callable[[int, int], Weight]] = {
    **{
        f"{bits} bits of {group_size}{', offsets' if has_offsets else ''}": partial(
            coded, bits, group_size, has_offsets=has_offsets
        )
        for bits in (4, 5, 6, 8)
        for group_size in (16, 32, 64, 128)
        for has_offsets in (False, True)
    },
    "4 bits, float scales": partial(coded, 4, 32, factors="float"),
    "8 bits, float scales and offsets": partial(coded, 8, 64, factors="float", has_offsets=True),
    "as Q4_K": partial(coded, 4, 32, factors="unsigned", has_offsets=True),
    "as Q5_K": partial(coded, 5, 32, factors="unsigned", has_offsets=True),
    "as Q6_K": partial(coded, 6, 16, factors="signed"),
    "one super per output": partial(coded, 8, 32, factors="one super"),
    "supers that fit no slice": partial(coded, 4, 32, factors="odd supers"),
    "mxfp4": partial(coded, 4, 32, factors="float", code_values=MXFP4),
    "mxfp4 with offsets": partial(coded, 4, 16, code_values=MXFP4, has_offsets=True),
    "uneven values": partial(coded, 4, 32, code_values=UNEVEN),
}
