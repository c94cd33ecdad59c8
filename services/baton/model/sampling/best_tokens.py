"""Finds the most likely token of each row, among all tokens or among those that a mask allows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.constraints.token_bits import Bits, ids_of


@dataclass(frozen=True, slots=True)
class BestTokens:
    """The most likely tokens of rows, on the device of the logits.

    token_ids: int64 [rows]. Of equal logits the lowest id wins. Arbitrary if one of the next is False.
    are_finite: bool [rows], whether the largest logit is finite and none is NaN.
    have_choice: bool [rows], whether a logit of an allowed token is above -inf. True without a mask.
    """

    token_ids: torch.Tensor
    are_finite: torch.Tensor
    have_choice: torch.Tensor


FindBest = Callable[[torch.Tensor, npt.NDArray[np.intp], Bits], BestTokens]
"""Finds the tokens of float32 logits, [rows, vocab_size]. The second argument has the rows with a mask, the
third their allowed tokens, [masked rows, num_words], at least one in each."""


def find_best(logits: torch.Tensor, masked: npt.NDArray[np.intp], bits: Bits) -> BestTokens:
    """Find the most likely tokens with torch and numpy, see `FindBest`. `masked` must be empty on a GPU."""
    best = logits.max(dim=-1)  # the maximum is NaN if any logit is
    have_choice = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for row, allowed in zip(masked, bits, strict=True):
        ids = ids_of(allowed)
        of_allowed = logits[row].numpy()[ids]
        best.indices[row] = int(ids[index := of_allowed.argmax()])
        have_choice[row] = bool(of_allowed[index] > -np.inf)
    return BestTokens(best.indices, torch.isfinite(best.values), have_choice)
