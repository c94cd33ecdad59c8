"""The module that takes the place of `nn.Linear`, whatever the format of its weight."""

from collections.abc import Callable

import torch
from torch import nn

from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import Weight

CHUNK_BYTES = 16 << 20
"""Bytes of float32 weights that `reference_product` holds at a time."""

Product = Callable[[torch.Tensor, Weight], torch.Tensor]
"""Returns x @ weight.T, [tokens, n] in the dtype of `x`, for x [tokens, k]."""


def reference_product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
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
    """Computes x @ weight.T + bias for a weight of any format; for inference only."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None, product: Product = reference_product) -> None:
        """weight: [out_features, in_features]. bias: [out_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product(x.reshape(-1, self.in_features), self.weight)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)
