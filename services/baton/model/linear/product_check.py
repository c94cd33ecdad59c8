"""Checks that the native product of a packed weight is right on this processor, in bounded memory."""

import torch

from baton.model.linear.packed_linear import LinearPart, PackedGemm
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weight_packing import PANEL
from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import Weight, in_input_order

CHECKED_PANELS = 8
"""Panels whose weights are compared, at both ends and evenly between."""
ROW_COUNTS = (1, 5, 17)
"""Rows of a decode, of a small batch, and of one that takes every other path of the kernels."""
LARGEST = 127
"""Largest of the integers that activations consist of. Rounding to 8 bits keeps those exactly."""
GROUP = 16
"""Inputs of the smallest group. The first of each has the largest size."""
ROUNDING = 5e-5
"""Error that float32 sums may have, as a fraction of the lengths of a row of x and of a row of the weight.

An input that is left out changes a sum by about this fraction if there are 20,000 inputs.
"""


def shape_class(packed: PackedWeight, dtype: torch.dtype) -> tuple[object, ...]:
    """Return what the path of the native product depends on: format, inputs and their order, full panels."""
    n, k = packed.shape
    return bytes(packed.format), k, packed.input_order is not None, n % PANEL == 0, dtype


def product_problem(packed: PackedWeight, weight: Weight | None, dtype: torch.dtype) -> str | None:
    """Return what is wrong with the product of a packed weight and rows of `dtype`; None if nothing is.

    Compares some panels, 64 outputs at a time, with a product in float64. weight: what was packed; its values
    must be found again bit for bit. None: it no longer exists.
    """
    n, k = packed.shape
    x = in_input_order(_exact_rows(max(ROW_COUNTS), k), packed.input_order)  # of which the groups consist
    product = PackedGemm(packed.kernels, LinearPart(packed), dtype=torch.float32)
    found = {rows: product(x[:rows].to(dtype)) for rows in ROW_COUNTS}
    for begin in _panel_begins(n):
        outputs = slice(begin, min(n, begin + PANEL))
        values = packed.rows(torch.arange(n)[outputs])
        if weight is not None and not _equal(values, take_rows(weight, outputs).dequantized()):
            return f"outputs {outputs.start} to {outputs.stop} were packed with other values"
        right = x.double() @ values.double().T
        limit = ROUNDING * x.double().norm(dim=1)[:, None] * values.double().norm(dim=1)
        for rows, out in found.items():
            error = (out[:, outputs].double() - right[:rows]).abs()
            if not (error <= limit[:rows]).all():
                return f"outputs {outputs.start} to {outputs.stop} of {rows} rows differ by up to {error.max():.2g}"
    return None


def _panel_begins(n: int) -> list[int]:
    last = (n - 1) // PANEL
    steps = min(last, CHECKED_PANELS - 1)
    return [PANEL * (last * i // max(1, steps)) for i in range(steps + 1)]


def _exact_rows(rows: int, k: int) -> torch.Tensor:
    """Return rows that every product multiplies without rounding them first."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-LARGEST, LARGEST + 1, (rows, k), generator=generator).float()
    x[:, ::GROUP] = LARGEST
    return x / 2**7


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
