"""Unpacks the blocks of GGUF's quantised tensor types into codes and factors, without loss.

Source: the block structures of ggml (`ggml-common.h`) and their dequantisation (`ggml-quants.c`). Bytes of a
block are in the order of the structure, little-endian.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of E2M1, so that they are integers."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedBlocks:
    """Codes and factors of m blocks. A value is `scale_code * super * code (+ min_code * min_super)`.

    codes: uint8 [m, values]. supers, min_supers: float32 [m, 1]. scale_codes, min_codes: int8 or uint8 [m,
    groups], or None for 1.
    """

    codes: torch.Tensor
    supers: torch.Tensor
    scale_codes: torch.Tensor | None = None
    min_supers: torch.Tensor | None = None
    min_codes: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """A tensor type of GGUF that a `CodedWeight` holds exactly.

    num_values, num_bytes: of a block. bits, group_size, code_values: of the `CodedWeight`. unpack: takes
    uint8 [m, num_bytes].
    """

    name: str
    num_values: int
    num_bytes: int
    bits: int
    group_size: int
    unpack: Callable[[torch.Tensor], UnpackedBlocks]
    code_values: tuple[int, ...] | None = None


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the float16 at byte `begin` of each block as float32 [m, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return [m, 2 * bytes]: the low nibbles of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _by_chunk(packed: torch.Tensor, chunk_bytes: int, num_parts: int) -> torch.Tensor:
    """Return the parts of each byte, chunk by chunk, lowest bits of a chunk first: [m, bytes * num_parts].

    num_parts: 2 for nibbles, 4 for pairs of bits, 8 for bits.
    """
    bits = 8 // num_parts
    chunks = packed.view(len(packed), -1, 1, chunk_bytes)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, num_parts, 1)
    return ((chunks >> shifts) & ((1 << bits) - 1)).reshape(len(packed), -1)


def _unpack_q4_0(blocks: torch.Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _unpack_q4_1(blocks: torch.Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(blocks[:, 4:]), _half(blocks, 0), min_supers=_half(blocks, 2))


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return bit 4 of 32 values, whose bits are in 4 bytes: [m, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (((packed[:, :, None] >> shifts) & 1) << 4).view(len(packed), 32)


def _unpack_q5_0(blocks: torch.Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0))


def _unpack_q5_1(blocks: torch.Tensor) -> UnpackedBlocks:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return UnpackedBlocks(codes, _half(blocks, 0), min_supers=_half(blocks, 2))


def _unpack_q8_0(blocks: torch.Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(blocks[:, 2:] ^ 128, _half(blocks, 0))  # adds 128 to an int8


def _unpack_q2_k(blocks: torch.Tensor) -> UnpackedBlocks:
    codes = _by_chunk(blocks[:, 16:80].contiguous(), 32, 4)
    factors = blocks[:, :16]
    return UnpackedBlocks(codes, _half(blocks, 80), factors & 15, -_half(blocks, 82), factors >> 4)


def _unpack_q3_k(blocks: torch.Tensor) -> UnpackedBlocks:
    """Values are 0 to 7, less 4. As a code of 4 bits, whose zero is 8, each is 4 more."""
    high = _by_chunk(blocks[:, :32].contiguous(), 32, 8)
    codes = _by_chunk(blocks[:, 32:96].contiguous(), 32, 4) + (high << 2) + 4
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, :8]) | (_by_chunk(packed[:, 8:].contiguous(), 4, 4) << 4)
    return UnpackedBlocks(codes, _half(blocks, 108), scales.view(torch.int8) - 32)


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8 scales and 8 minima of 6 bits each, uint8 [m, 8], from the 12 bytes of Q4_K and Q5_K."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), dim=1)
    mins = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, mins


def _unpack_q4_k(blocks: torch.Tensor) -> UnpackedBlocks:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    codes = _by_chunk(blocks[:, 16:].contiguous(), 32, 2)
    return UnpackedBlocks(codes, _half(blocks, 0), scales, -_half(blocks, 2), mins)


def _unpack_q5_k(blocks: torch.Tensor) -> UnpackedBlocks:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    high = _by_chunk(blocks[:, 16:48].contiguous(), 32, 8)
    codes = _by_chunk(blocks[:, 48:].contiguous(), 32, 2) | (high << 4)
    return UnpackedBlocks(codes, _half(blocks, 0), scales, -_half(blocks, 2), mins)


def _unpack_q6_k(blocks: torch.Tensor) -> UnpackedBlocks:
    low = _by_chunk(blocks[:, :128].contiguous(), 64, 2)
    high = _by_chunk(blocks[:, 128:192].contiguous(), 32, 4)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return UnpackedBlocks(low | (high << 4), _half(blocks, 208), scales)


def _unpack_iq4_xs(blocks: torch.Tensor) -> UnpackedBlocks:
    high = _by_chunk(blocks[:, 2:4].contiguous(), 1, 4) << 4
    low = _by_chunk(blocks[:, 4:8].contiguous(), 1, 2)
    scales = (low | high).view(torch.int8) - 32
    return UnpackedBlocks(_by_chunk(blocks[:, 8:].contiguous(), 16, 2), _half(blocks, 0), scales)


def mx_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return half of the powers of two that uint8 exponents stand for (E8M0), as float32.

    Half, because `MXFP4_VALUES` are doubled.
    """
    return torch.ldexp(torch.ones((), dtype=torch.float64), exponents.double() - 128).float()


def _unpack_mxfp4(blocks: torch.Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(blocks[:, 1:]), mx_scales(blocks[:, :1]))


_FORMATS = {
    2: BlockFormat(name="Q4_0", num_values=32, num_bytes=18, bits=4, group_size=32, unpack=_unpack_q4_0),
    3: BlockFormat(name="Q4_1", num_values=32, num_bytes=20, bits=4, group_size=32, unpack=_unpack_q4_1),
    6: BlockFormat(name="Q5_0", num_values=32, num_bytes=22, bits=5, group_size=32, unpack=_unpack_q5_0),
    7: BlockFormat(name="Q5_1", num_values=32, num_bytes=24, bits=5, group_size=32, unpack=_unpack_q5_1),
    8: BlockFormat(name="Q8_0", num_values=32, num_bytes=34, bits=8, group_size=32, unpack=_unpack_q8_0),
    10: BlockFormat(name="Q2_K", num_values=256, num_bytes=84, bits=4, group_size=16, unpack=_unpack_q2_k),
    11: BlockFormat(name="Q3_K", num_values=256, num_bytes=110, bits=4, group_size=16, unpack=_unpack_q3_k),
    12: BlockFormat(name="Q4_K", num_values=256, num_bytes=144, bits=4, group_size=32, unpack=_unpack_q4_k),
    13: BlockFormat(name="Q5_K", num_values=256, num_bytes=176, bits=5, group_size=32, unpack=_unpack_q5_k),
    14: BlockFormat(name="Q6_K", num_values=256, num_bytes=210, bits=6, group_size=16, unpack=_unpack_q6_k),
    20: BlockFormat(
        name="IQ4_NL",
        num_values=32,
        num_bytes=18,
        bits=4,
        group_size=32,
        unpack=_unpack_q4_0,
        code_values=IQ4_VALUES,
    ),
    23: BlockFormat(
        name="IQ4_XS",
        num_values=256,
        num_bytes=136,
        bits=4,
        group_size=32,
        unpack=_unpack_iq4_xs,
        code_values=IQ4_VALUES,
    ),
    39: BlockFormat(
        name="MXFP4",
        num_values=32,
        num_bytes=17,
        bits=4,
        group_size=32,
        unpack=_unpack_mxfp4,
        code_values=MXFP4_VALUES,
    ),
}
BLOCK_FORMATS: Mapping[int, BlockFormat] = _FORMATS
"""Formats by the number of the tensor type."""
