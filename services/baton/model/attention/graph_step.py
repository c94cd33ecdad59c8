"""Provides the attention inputs of a decode step inside a CUDA graph: tensors at fixed addresses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from baton.model.attention.attention_inputs import AttentionParams, StepCache
from baton.model.device.kv_tensors import KvCache, TokenSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTables:
    """Position and block tables of each sequence, int32 on the device.

    position: [batch], KV index of the sequence's token.
    block_ids: [num_tables, batch, max_blocks].
    """

    position: torch.Tensor
    block_ids: torch.Tensor


DecodeKernel = Callable[[torch.Tensor, int, "GraphStep", float, int | None, torch.Tensor | None], torch.Tensor]
"""Paged attention for one token per sequence, inside a CUDA graph.

Like `PagedKernel`, but it reads only `cache` and `decodes` of its step.
"""


class GraphStep(StepCache):
    """Takes the place of `AttentionStep` inside a CUDA graph. Its kernel reads `decodes`."""

    def __init__(self, cache: KvCache, kernel: DecodeKernel, batch: int, max_blocks: int) -> None:
        super().__init__()
        self.cache = cache
        self.kernel = kernel
        num_tables = cache.num_tables
        offsets, *block_ids = torch.zeros(1 + num_tables, batch, dtype=torch.int64, device=cache.device).unbind()
        self.slots = tuple(TokenSlots(own, offsets) for own in block_ids)
        self.decodes = DecodeTables(
            position=torch.zeros(batch, dtype=torch.int32, device=cache.device),
            block_ids=torch.zeros(num_tables, batch, max_blocks, dtype=torch.int32, device=cache.device),
        )

    def slots_of(self, layer: int) -> TokenSlots:
        """Return the slots of a layer, see `AttentionStep.slots_of`."""
        return self.slots[self.cache.table_of[layer]]

    def observe(self, layer: int, attention_mask: Any, attention_params: AttentionParams) -> None:
        """Do nothing; see `AttentionStep.observe`."""
