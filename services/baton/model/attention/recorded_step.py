"""The attention inputs of a recorded decode step: tensors at fixed addresses, one token per sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from baton.model.attention.attention_inputs import Asked, Once
from baton.model.device.kv_tensors import KvCache


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTables:
    """Of each of [batch] sequences, int32 on the device: its token's KV index, and its blocks, [batch,
    max_blocks]."""

    position: torch.Tensor
    block_ids: torch.Tensor


DecodeKernel = Callable[[torch.Tensor, int, "StaticStep", float, int | None], torch.Tensor]
"""Attention of one token a sequence that reads nothing of its step but `cache` and `decodes`; else as
`PagedKernel`."""


class StaticStep(Once):
    """Stands for an `AttentionStep` in a recording. Its kernel reads `decodes`."""

    def __init__(self, cache: KvCache, kernel: DecodeKernel, batch: int, max_blocks: int) -> None:
        super().__init__()
        self.cache = cache
        self.kernel = kernel
        self.token_rows = torch.zeros(2 * cache.num_kv_heads * batch, dtype=torch.int64, device=cache.device)
        self.decodes = DecodeTables(
            position=torch.zeros(batch, dtype=torch.int32, device=cache.device),
            block_ids=torch.zeros(batch, max_blocks, dtype=torch.int32, device=cache.device),
        )

    def observe(self, layer: int, attention_mask: Any, asked: Asked) -> None:
        """As `AttentionStep.observe`."""
