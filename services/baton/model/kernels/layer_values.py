"""Defines what the kernels between matrix products take: norms, rotary tables and gates."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """An RMS norm: x / sqrt(mean(x * x) + eps) * factor.

    factor: float32 [size]. It is `1 + weight` for models that store it so.
    """

    factor: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Norms of queries and keys; None if they are not normalised.

    over_all_heads: a norm is over all heads of a token, with a factor for each of their elements, instead of
    over each head.
    """

    q: RmsNorm | None = None
    k: RmsNorm | None = None
    over_all_heads: bool = False


NO_HEAD_NORMS = HeadNorms()


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate of an MLP: activation(gate) * (up + up_shift), of the halves of its first product.

    activation: its name. alpha: of silu, x * sigmoid(alpha * x); unused for others. limit: the largest gate,
    and the largest size of up, before.
    """

    activation: str
    alpha: float = 1.0
    limit: float = math.inf
    up_shift: float = 0.0


@dataclass(frozen=True, slots=True)
class Rotary:
    """RoPE of a step: cosine and sine, each float32 [num_tokens, half].

    Of each head, element i of the first `half` elements is rotated with element i of the second `half`. The
    rest of a head stays.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
