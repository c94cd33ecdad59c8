"""From a `StepPlan` to tensors: each sequence is checked alone, then all are packed into one batch without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.model.attention import PagedKernel
from baton.engine.model.attention_step import AttentionStep, CausalMasks, Segment
from baton.engine.model.kv_cache import KvCache
from baton.engine.model.staging import upload
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
        token_ids=upload(np.concatenate([part.token_ids for part in parts]), device),
        position_ids=upload(np.concatenate(positions), device),
        sample_rows=upload(np.array(sample_rows, dtype=np.int64), device),
    )
