"""Turns the tensors of a GGUF file into weights: without loss, or dequantised to bfloat16 if rare."""

from collections.abc import Sequence

import torch
from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME, dequantize

from baton.model.linear.weight_packing import packed_bits
from baton.model.linear.weights import CodedWeight, FloatWeight, GroupFactors, Weight
from baton.model.loading.gguf.block_formats import BLOCK_FORMATS, BlockFormat, UnpackedBlocks

FLOAT_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Tensor types that hold values as they are."""
CHUNK_VALUES = 4 << 20
"""Values that are unpacked at a time; bounds the memory beside the result."""


def block_shape(type_id: int) -> tuple[int, int] | None:
    """Return (values, bytes) of a block of a type; None if it cannot be read."""
    if type_id in FLOAT_TYPES:
        return 1, FLOAT_TYPES[type_id].itemsize
    if type_id in BLOCK_FORMATS:
        return BLOCK_FORMATS[type_id].num_values, BLOCK_FORMATS[type_id].num_bytes
    return GGML_BLOCK.get(type_id)


def type_name(type_id: int) -> str:
    """Return the name of a tensor type, or its number."""
    if type_id in FLOAT_TYPES:
        return str(FLOAT_TYPES[type_id]).removeprefix("torch.")
    if type_id in BLOCK_FORMATS:
        return BLOCK_FORMATS[type_id].name
    return GGML_NAME.get(type_id, f"number {type_id}")


def dtype_of(type_ids: Sequence[int]) -> str:
    """Return the name of a model's dtype, from the types of its tensors: bfloat16 if any is quantised.

    Beside tensors of 16 bits, those of 32 are norms.
    """
    kinds = set(type_ids)
    if not kinds <= FLOAT_TYPES.keys() or 30 in kinds:
        return "bfloat16"
    return "float16" if 1 in kinds else "float32"


def is_coded(type_id: int) -> bool:
    """True for a type whose tensors become a `CodedWeight`."""
    return type_id in BLOCK_FORMATS


def packed_bits_of(type_id: int) -> float:
    """Return the bits that one weight of a coded type takes when packed, factors included."""
    block = BLOCK_FORMATS[type_id]
    return packed_bits(weight_of(torch.zeros(block.num_bytes, dtype=torch.uint8), type_id, 1, block.num_values))


def is_dequantised(type_id: int) -> bool:
    """True for a type that no `CodedWeight` holds: its tensors become bfloat16."""
    return type_id not in FLOAT_TYPES and type_id not in BLOCK_FORMATS


def weight_of(raw: torch.Tensor, type_id: int, num_rows: int, num_columns: int) -> Weight:
    """Return the weight [num_rows, num_columns] that is stored in `raw`, the bytes of the tensor.

    The result does not refer to `raw`.
    """
    if type_id in FLOAT_TYPES:
        return FloatWeight(raw.view(FLOAT_TYPES[type_id]).view(num_rows, num_columns).clone())
    if type_id in BLOCK_FORMATS:
        return _coded_weight(raw, BLOCK_FORMATS[type_id], num_rows, num_columns)
    blocks = raw.view(num_rows, -1)
    values = torch.empty(num_rows, num_columns, dtype=torch.bfloat16)
    for begin, end in _row_chunks(num_rows, num_columns):
        values[begin:end] = dequantize(blocks[begin:end], type_id).view(end - begin, num_columns)
    return FloatWeight(values)


def floats_of(raw: torch.Tensor, type_id: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor as float32, for norms, biases and other small tensors."""
    return weight_of(raw, type_id, torch.Size(shape[:-1]).numel(), shape[-1]).dequantized().view(shape)


def _row_chunks(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    step = max(1, CHUNK_VALUES // num_columns)
    return [(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]


def _coded_weight(raw: torch.Tensor, block: BlockFormat, num_rows: int, num_columns: int) -> CodedWeight:
    """Unpack the blocks of all rows, some rows at a time."""
    rows = raw.view(num_rows, -1)
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8)
    parts: list[UnpackedBlocks] = []
    for begin, end in _row_chunks(num_rows, num_columns):
        part = block.unpack(rows[begin:end].reshape(-1, block.num_bytes))
        codes[begin:end] = part.codes.view(end - begin, num_columns)
        parts.append(UnpackedBlocks(codes[:0], part.supers, part.scale_codes, part.min_supers, part.min_codes))
    has_mins = parts[0].min_supers is not None
    return CodedWeight(
        codes,
        block.bits,
        block.group_size,
        _factors([part.supers for part in parts], [part.scale_codes for part in parts], block, num_rows),
        _factors([part.min_supers for part in parts], [part.min_codes for part in parts], block, num_rows)
        if has_mins
        else None,
        block.code_values,
    )


def _factors(
    supers: list[torch.Tensor | None] | list[torch.Tensor],
    codes: list[torch.Tensor | None],
    block: BlockFormat,
    num_rows: int,
) -> GroupFactors:
    """Join the factors of all chunks, by rows."""
    known = [each for each in codes if each is not None]
    return GroupFactors(
        torch.cat([each for each in supers if each is not None]).view(num_rows, -1),
        block.num_values,
        torch.cat(known).view(num_rows, -1) if known else None,
    )
