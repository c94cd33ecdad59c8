"""From a `StepPlan` to tensors: each sequence is checked alone, then all are packed into one batch without
padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.state.step import SampleRequest, StepSequence
from baton.model.attention.attention_inputs import AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import PagedKernel
from baton.model.device.async_copy import upload
from baton.model.device.kv_tensors import KvCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence's share of a step, checked: token_ids [num_tokens], block_ids those of its table that hold
    its context."""

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


class BlockTables:
    """Block tables as arrays, checked; one is made again only where a sequence has another tuple. Holds those
    of the step at hand and of the one before it."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._before: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        self._now: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}

    def next_step(self) -> None:
        self._before, self._now = self._now, {}

    def of(self, sequence: StepSequence) -> np.ndarray:
        """int64 [blocks], not to be written. Raises ValueError for blocks that do not exist."""
        known = self._before.get(sequence.seq_id)
        if known is None or known[0] is not sequence.block_table:
            block_ids = np.array(sequence.block_table, dtype=np.int64)
            if block_ids.size and (block_ids.min() < 0 or block_ids.max() >= self._num_blocks):
                raise ValueError(
                    f"block ids {block_ids.min()} to {block_ids.max()} where 0 to {self._num_blocks - 1} exist"
                )
            known = sequence.block_table, block_ids
        self._now[sequence.seq_id] = known
        return known[1]


def prepare(sequence: StepSequence, tables: BlockTables, block_size_tokens: int, vocab_size: int) -> Part:
    """Raises ValueError for what would harm other sequences: ids outside the vocabulary, blocks that do not
    exist, too short a table."""
    token_ids = np.array(sequence.token_ids, dtype=np.int64)
    if not token_ids.size or sequence.kv_begin < 0 or sequence.position_begin < 0:
        raise ValueError(f"{token_ids.size} tokens at position {sequence.position_begin}, KV index {sequence.kv_begin}")
    if token_ids.max() >= vocab_size:
        raise ValueError(f"token id {token_ids.max()} is outside the vocabulary of {vocab_size}")
    num_blocks = -(-sequence.context_len // block_size_tokens)
    block_ids = tables.of(sequence)[:num_blocks]
    if block_ids.size < num_blocks:
        raise ValueError(
            f"{block_ids.size} blocks for a context of {sequence.context_len} tokens, which needs {num_blocks}"
        )
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
    counts = np.array([part.token_ids.size for part in parts])
    ends = np.cumsum(counts)
    begins = ends - counts
    segments = [
        Segment(token_begin=begin, num_tokens=count, kv_begin=part.kv_begin, block_ids=part.block_ids)
        for part, begin, count in zip(parts, begins.tolist(), counts.tolist(), strict=True)
    ]
    shifts = np.array([part.position_begin for part in parts]) - begins
    device = cache.device
    return PackedStep(
        attention=AttentionStep(cache, segments, masks, kernel),
        token_ids=upload(np.concatenate([part.token_ids for part in parts]), device),
        position_ids=upload(np.arange(ends[-1]) + np.repeat(shifts, counts), device),
        sample_rows=upload(ends[[part.sample is not None for part in parts]] - 1, device),
    )
