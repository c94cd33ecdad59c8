"""The module that takes the place of `nn.Linear`, whatever the format of its weight."""

import torch
from torch import nn

from baton.model.kernels.cpu.kernel_args import DTYPES
from baton.model.linear.packed_linear import PackedGemm
from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import Weight

CHUNK_BYTES = 16 << 20
"""Bytes of float32 weights that `reference_product` holds at a time."""


def reference_product(x: torch.Tensor, weight: Weight | PackedWeight) -> torch.Tensor:
    """Return x @ weight.T with the dequantised weight in the dtype of `x`, some rows of it at a time.

    It defines what every product computes, and is slow: it dequantises the whole weight at each call.
    """
    num_rows, num_columns = weight.shape
    rows = max(1, CHUNK_BYTES // (4 * max(1, num_columns)))
    out = x.new_empty(len(x), num_rows)
    for begin in range(0, num_rows, rows):
        values = take_rows(weight, slice(begin, begin + rows)).dequantized().to(x.dtype)
        out[:, begin : begin + rows] = x @ values.T
    return out


class Linear(nn.Module):
    """Computes x @ weight.T + bias for a weight of any format; for inference only.

    A packed weight is multiplied by the processor's kernels, any other by `reference_product`.
    """

    def __init__(self, weight: Weight | PackedWeight, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features]. bias: [out_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._gemm: PackedGemm | None = None  # made at the first call, when the bias has its values

    @property
    def is_packed(self) -> bool:
        """True if the native product computes it."""
        return isinstance(self.weight, PackedWeight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, PackedWeight):
            self._gemm = self._gemm or PackedGemm(self.weight.kernels, self)
            return self._gemm(x) if x.dtype in DTYPES else self._gemm(x.float()).to(x.dtype)
        out = reference_product(x.reshape(-1, self.in_features), self.weight)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)
