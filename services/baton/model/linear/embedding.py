"""The module that takes the place of an `nn.Embedding` whose weight stays in its stored format."""

from typing import cast

import torch
from torch import nn
from torch.func import functional_call

from baton.model.linear.packed_weight import PackedWeight
from baton.model.linear.weight_rows import take_rows
from baton.model.linear.weights import Weight


class WeightEmbedding(nn.Module):
    """Dequantises the rows that are looked up, and leaves the rest to the embedding that it replaces.

    The original module may scale its result, as Gemma's does. It runs with these rows as its whole weight.
    """

    def __init__(self, weight: Weight | PackedWeight, original: nn.Embedding, dtype: torch.dtype) -> None:
        """weight: [vocabulary, hidden]. original: its own weight is freed. dtype: of the result."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.weight = weight
        original.weight = nn.Parameter(original.weight.new_empty(0), requires_grad=False)
        original.padding_idx = None  # matters for gradients only, and may be beyond the rows of a call
        self._is_plain = type(original) is nn.Embedding and original.max_norm is None  # it returns its rows as they are
        self._original = [original]  # in a list, so that its weight is not one of this module's parameters
        self._dtype = dtype

    @property
    def original(self) -> nn.Embedding:
        """The embedding that this one replaces, without a weight."""
        return self._original[0]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = take_rows(self.weight, token_ids.reshape(-1)).dequantized().to(self._dtype)
        if self._is_plain:
            return rows.view(*token_ids.shape, self.embedding_dim)
        order = torch.arange(len(rows), device=rows.device).view(token_ids.shape)
        return cast(torch.Tensor, functional_call(self.original, {"weight": rows}, (order,)))
