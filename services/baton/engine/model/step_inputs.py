"""From a `StepPlan` to tensors: each sequence is checked alone, then all are packed into one batch without padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from baton.engine.model.attention import PagedKernel
from baton.engine.model.attention_step import AttentionStep, CausalMasks, Segment
from baton.engine.model.kv_cache import KvCache
from baton.engine.step import SampleRequest, StepSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence's share of a step, checked: token_ids [num_tokens], block_ids those of its table that hold its context."""

    seq_id: int
    token_ids: np.ndarray
    position_begin: int
    kv_begin: int
    block_ids: np.ndarray
    sample: SampleRequest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """token_ids and position_ids [num_tokens]; sample_rows [parts that sample]: the last token of each."""

    attention: AttentionStep
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    sample_rows: torch.Tensor


def prepare(sequence: StepSequence, cache: KvCache, vocab_size: int) -> Part:
    """Raises ValueError for what would harm other sequences: ids outside the vocabulary, blocks that do not exist, too short a table."""
    token_ids = np.array(sequence.token_ids, dtype=np.int64)
    num_blocks = -(-sequence.context_len // cache.block_size_tokens)
    block_ids = np.array(sequence.block_table[:num_blocks], dtype=np.int64)
    if not token_ids.size or sequence.kv_begin < 0 or sequence.position_begin < 0:
        raise ValueError(f"{token_ids.size} tokens at position {sequence.position_begin}, KV index {sequence.kv_begin}")
    if token_ids.max() >= vocab_size:
        raise ValueError(f"token id {token_ids.max()} is outside the vocabulary of {vocab_size}")
    if block_ids.size < num_blocks:
        raise ValueError(f"{block_ids.size} blocks for a context of {sequence.context_len} tokens, which needs {num_blocks}")
    if block_ids.min() < 0 or block_ids.max() >= cache.num_blocks:
        raise ValueError(f"block ids {block_ids.min()} to {block_ids.max()} where 0 to {cache.num_blocks - 1} exist")
    return Part(
        seq_id=sequence.seq_id,
        token_ids=token_ids,
        position_begin=sequence.position_begin,
        kv_begin=sequence.kv_begin,
        block_ids=block_ids,
        sample=sequence.sample,
    )


def pack(parts: Sequence[Part], cache: KvCache, masks: CausalMasks, kernel: PagedKernel) -> PackedStep:
    """All parts' tokens behind each other; there is at least one part."""
    segments, positions, sample_rows = [], [], []
    row = 0
    for part in parts:
        count = part.token_ids.size
        segments.append(Segment(token_begin=row, num_tokens=count, kv_begin=part.kv_begin, block_ids=part.block_ids))
        positions.append(np.arange(part.position_begin, part.position_begin + count))
        row += count
        if part.sample is not None:
            sample_rows.append(row - 1)
    device = cache.device
    return PackedStep(
        attention=AttentionStep(cache, segments, masks, kernel),
        token_ids=torch.from_numpy(np.concatenate([part.token_ids for part in parts])).to(device),
        position_ids=torch.from_numpy(np.concatenate(positions)).to(device),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
    )


class FiniteWatch:
    """Sees the model's last hidden states of every token, sampled from or not, so that KV that is not numbers never leaves its sequence.

    A value that is not a number in any layer's keys, values or activations of a token is one in its last hidden state too: the token
    attends to itself, and the residual stream carries it on.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._finite = np.empty(0, dtype=bool)
        self._handle = model.base_model.register_forward_hook(self._see)

    def _see(self, _module: torch.nn.Module, _arguments: object, output: Any) -> None:
        hidden: torch.Tensor = output[0]  # the hidden states come first in every base model's output
        self._finite = torch.isfinite(hidden[0].float().sum(dim=-1)).cpu().numpy()

    def bad_seq_ids(self, parts: Sequence[Part]) -> list[int]:
        """Sequences of the latest forward with a hidden state that is not a number."""
        if self._finite.all():
            return []
        ends = np.cumsum([part.token_ids.size for part in parts])
        return [part.seq_id for part, end in zip(parts, ends, strict=True) if not self._finite[end - part.token_ids.size : end].all()]

    def remove(self) -> None:
        self._handle.remove()
