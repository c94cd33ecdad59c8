"""Defines where the weights of a model come from: a checkpoint, with its names and formats translated."""

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.model.linear.experts import ExpertWeights
from baton.model.linear.weights import Weight


class WeightSource(Protocol):
    """Weights by the names of the model's modules and parameters.

    description: format of the weights, for the log.
    may_have_more: the checkpoint may have tensors that change no result, such as those of other parts. Else a
    tensor without a place in the model means that the model would compute something else.
    """

    description: str
    may_have_more: bool

    def weight(self, module: str) -> Weight | None:
        """Return the weight of a linear layer or an embedding; None if the checkpoint has none.

        Raises ModelError if it is unusable.
        """
        ...

    def is_coded(self, module: str) -> bool:
        """True if the checkpoint has the weight of this module, or of its experts, in a quantised format."""
        ...

    def packed_bytes(self) -> int:
        """Return the bytes that all coded weights take at most when packed, factors included."""
        ...

    def experts(self, module: str, num_experts: int) -> Sequence[ExpertWeights[Weight]] | None:
        """Return the weights of a block's experts; None if the checkpoint does not have them by expert.

        Raises ModelError if some are missing or unusable.
        """
        ...

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return any other parameter or buffer; None if the checkpoint has none."""
        ...

    def rope_factors(self) -> torch.Tensor | None:
        """Return divisors of the rotary frequencies, float32 [head_dim / 2]; None if there are none."""
        ...

    def unused(self) -> list[str]:
        """Return the names of tensors that were not asked for."""
        ...
