"""Quantises keys and values to int8, with one scale for each token and head.

The result depends on nothing but the head's own numbers. So chunks, batches and roles never change a byte of
KV, and a pulled block equals one that was computed here. layers.h does the same with the same float32
operations, in the same order: both write the same bytes.
"""

import torch

from baton.core.kv.kv_layout import SCALE_DTYPE

LEVELS = 127
"""Largest magnitude of a stored integer; the range is symmetric, so -128 is not used."""
_SCALE = {"bfloat16": torch.bfloat16}[SCALE_DTYPE]


def quantize(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int8 of the same shape, scales of the shape without the last dimension).

    A scale is the largest magnitude divided by 127, rounded to bfloat16. The numbers are divided by the
    rounded scale, so a rounded scale moves the largest number by at most a quarter of a step. NaN or an
    infinite number makes the scale NaN or infinite, so that attention to this token stays not finite.
    """
    wide = numbers.float()
    scales = (wide.abs().amax(dim=-1) * torch.tensor(1.0 / LEVELS, dtype=torch.float32)).to(_SCALE)
    divisor = scales.float()
    divisor = torch.where(divisor == 0, 1.0, divisor)
    steps = (wide / divisor[..., None]).nan_to_num(0.0).clamp(-LEVELS, LEVELS).round()
    return steps.to(torch.int8), scales


def dequantize(steps: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `steps * scales` in `dtype`; one scale for each row of the last dimension."""
    return (steps.float() * scales.float()[..., None]).to(dtype)
