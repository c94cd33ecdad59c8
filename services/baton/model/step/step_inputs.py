"""Turns a `StepPlan` into tensors: checks each sequence separately, then packs them without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.kv.kv_tables import NO_BLOCK
from baton.engine.state.step import PromptRequest, SampleRequest, StepSequence
from baton.model.attention.attention_inputs import AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import PagedKernel
from baton.model.device.async_copy import upload
from baton.model.device.kv_tensors import KvCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSequence:
    """One sequence's checked part of a step.

    token_ids: int64 [num_tokens].
    block_ids: int64, the flat block table (`core.kv.kv_tables`) of its context.
    The other fields are as in `StepSequence`.
    """

    seq_id: int
    token_ids: np.ndarray
    position_begin: int
    kv_begin: int
    block_ids: np.ndarray
    sample: SampleRequest | None
    prompt: PromptRequest | None = None

    @property
    def num_sample_rows(self) -> int:
        """Number of rows that sample: that of its last token and those of drafts."""
        return 0 if self.sample is None else 1 + len(self.sample.drafts)

    def logit_rows(self, begin: int) -> np.ndarray:
        """Return the rows of its logits, if its tokens begin at row `begin`: those of prompt targets, then
        those that sample."""
        num_targets = 0 if self.prompt is None else len(self.prompt.targets)
        end = begin + self.token_ids.size
        return np.array([*range(begin, begin + num_targets), *range(end - self.num_sample_rows, end)], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """The tensors of one step, on the device.

    attention: index tensors for the paged attention.
    token_ids, position_ids: [num_tokens], all sequences one after the other.
    sample_rows: rows whose logits are needed, see `PreparedSequence.logit_rows`.
    """

    attention: AttentionStep
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    sample_rows: torch.Tensor


class BlockTables:
    """Caches block tables as checked arrays; converts one only if a sequence has a new tuple.

    It holds the tables of the current step and of the step before.
    """

    def __init__(self, num_blocks: int, num_tables: int = 1) -> None:
        self._num_blocks, self.num_tables = num_blocks, num_tables
        self._before: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        self._now: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}

    def next_step(self) -> None:
        """Start a new step; tables that the last step did not use are dropped."""
        self._before, self._now = self._now, {}

    def of(self, sequence: StepSequence) -> np.ndarray:
        """Return a sequence's flat block table, int64, read-only, up to the last token with blocks in every
        table.

        Raises ValueError for blocks that do not exist.
        """
        known = self._before.get(sequence.seq_id)
        if known is None or known[0] is not sequence.block_table:
            block_ids = _with_own_blocks(np.array(sequence.block_table, dtype=np.int64), self.num_tables)
            if block_ids.size and (block_ids.min() < 0 or block_ids.max() >= self._num_blocks):
                raise ValueError(
                    f"block ids {block_ids.min()} to {block_ids.max()}; must be 0 to {self._num_blocks - 1}"
                )
            known = sequence.block_table, block_ids
        self._now[sequence.seq_id] = known
        return known[1]


def _with_own_blocks(block_ids: np.ndarray, num_tables: int) -> np.ndarray:
    """Replace leading NO_BLOCK entries of each table, which no layer reads, by the table's first block.

    A kernel that reads one by mistake then reads neither another sequence's memory nor memory that does not
    exist. Tokens at the end for which a table has no block yet are left out.
    """
    rows = block_ids.reshape(-1, num_tables)
    is_held = rows != NO_BLOCK
    if is_held.all():
        return block_ids
    held = [np.flatnonzero(column) for column in is_held.T]
    if not all(own.size for own in held):
        return block_ids
    for table, own in enumerate(held):
        rows[: own[0], table] = rows[own[0], table]
    return block_ids[: num_tables * (1 + min(int(own[-1]) for own in held))]


def prepare_sequence(
    sequence: StepSequence, tables: BlockTables, block_size_tokens: int, vocab_size: int
) -> PreparedSequence:
    """Check one sequence of a plan. Raises ValueError for anything that would harm other sequences.

    That is token ids outside the vocabulary, blocks that do not exist, or a block table that is too short.
    """
    token_ids, context_len = np.array(sequence.token_ids, dtype=np.int64), sequence.context_len
    if not token_ids.size or sequence.kv_begin < 0 or sequence.position_begin < 0:
        raise ValueError(
            f"{token_ids.size} tokens at position {sequence.position_begin}, KV index {sequence.kv_begin}; "
            "there must be at least one token, and neither may be negative"
        )
    if sequence.prompt is not None and (
        len(sequence.prompt.targets) > token_ids.size or max(sequence.prompt.targets) >= vocab_size
    ):
        raise ValueError(
            f"{len(sequence.prompt.targets)} prompt targets for {token_ids.size} tokens, at most id "
            f"{max(sequence.prompt.targets)}; there must be no more than tokens, with ids below {vocab_size}"
        )
    if sequence.num_drafts >= token_ids.size:
        raise ValueError(f"{sequence.num_drafts} drafts among {token_ids.size} tokens; there must be another token")
    # The reduction of an array takes longer than all other checks of a decoding sequence.
    largest = sequence.token_ids[0] if token_ids.size == 1 else token_ids.max()
    if largest >= vocab_size:
        raise ValueError(f"token id {largest} is outside the vocabulary of {vocab_size} tokens")
    num_entries = -(-context_len // block_size_tokens) * tables.num_tables
    block_ids = tables.of(sequence)[:num_entries]
    if block_ids.size < num_entries:
        raise ValueError(f"{block_ids.size} blocks for a context of {context_len} tokens, which needs {num_entries}")
    return PreparedSequence(
        seq_id=sequence.seq_id,
        token_ids=token_ids,
        position_begin=sequence.position_begin,
        kv_begin=sequence.kv_begin,
        block_ids=block_ids,
        sample=sequence.sample,
        prompt=sequence.prompt,
    )


def pack(parts: Sequence[PreparedSequence], cache: KvCache, masks: CausalMasks, kernel: PagedKernel) -> PackedStep:
    """Pack the tokens of all sequences, at least one, into one batch."""
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
        sample_rows=upload(_logit_rows(parts, begins, ends), device),
    )


def _logit_rows(parts: Sequence[PreparedSequence], begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    if all(part.prompt is None and part.num_sample_rows <= 1 for part in parts):
        rows: np.ndarray = ends[[part.sample is not None for part in parts]] - 1
        return rows
    return np.concatenate([part.logit_rows(begin) for part, begin in zip(parts, begins.tolist(), strict=True)])
