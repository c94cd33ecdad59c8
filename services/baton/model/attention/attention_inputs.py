"""Builds the index tensors that tell attention which KV each token of a step reads and writes.

They are made once per step and used by every layer.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from baton.model.device.async_copy import upload
from baton.model.device.kv_tensors import BlockRows, KvCache, TokenSlots

T = TypeVar("T")

TILE_TOKENS = 128
"""Queries per attention tile of a prompt chunk. Tiles skip most of the masked part of the matrix."""
_MAX_GROUP_BYTES = 64 << 20
"""Limit of the KV gathered at a time for decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One sequence's tokens of a step.

    The tokens are rows `token_begin` and following of the packed batch. Their KV is stored at indices
    `kv_begin` and following of the sequence's cache.

    block_ids: int64 [num_blocks * num_tables], a flat block table (`core.kv.kv_tables`).
    """

    token_begin: int
    num_tokens: int
    kv_begin: int
    block_ids: np.ndarray

    @property
    def context_len(self) -> int:
        return self.kv_begin + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Decoding sequences with contexts of similar length, attended in one call.

    tokens: [num_seqs], rows in the packed batch.
    blocks: for `KvCache.gather`.
    mask: additive, [num_seqs, 1, 1, gathered tokens]; None if every slot is visible.
    stale_seqs, stale_slots: gathered slots that were never written for this sequence.
    """

    tokens: torch.Tensor
    blocks: BlockRows
    mask: torch.Tensor | None
    stale_seqs: torch.Tensor | None
    stale_slots: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Query rows [token_begin, token_end) against gathered KV [kv_begin, kv_end).

    mask: additive, [rows, kv].
    """

    token_begin: int
    token_end: int
    kv_begin: int
    kv_end: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Several tokens of one sequence, as tiles over one gathered context."""

    blocks: BlockRows
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """Attention work of one step for all layers with the same block table and sliding window."""

    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


class CausalMasks:
    """Causal masks for tiles, cut out of one large mask per window.

    Aligned at the lower right corner, the masks of all tiles are the same.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._masks: dict[int | None, torch.Tensor] = {}

    def tile(self, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
        """Return the mask [num_queries, num_keys]: 0 for visible, -inf for hidden.

        The last query is at the position of the last key, the query before it one position earlier, and so
        on.
        """
        mask = self._masks.get(window)
        if mask is None or mask.shape[1] < num_keys:
            size = max(1024, 1 << (num_keys - 1).bit_length())
            keys_back = torch.arange(size - 1, -1, -1, device=self._device)[None, :]
            queries_back = torch.arange(TILE_TOKENS - 1, -1, -1, device=self._device)[:, None]
            hidden = keys_back < queries_back
            if window is not None:
                hidden |= keys_back >= queries_back + window
            mask = torch.zeros(TILE_TOKENS, size, dtype=self._dtype, device=self._device).masked_fill_(
                hidden, float("-inf")
            )
            self._masks[window] = mask
        tile = mask[TILE_TOKENS - num_queries :, mask.shape[1] - num_keys :]
        if self._device.type == "cpu":
            return tile
        # torch's CUDA kernels read masks in vectors. They check the strides, not where the memory begins.
        return tile.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Attention settings of one layer.

    scaling: factor for the scores.
    window: number of visible tokens, the current one included; None for all.
    sinks: [num_heads], a score per head that takes part in each softmax and has no value; None: no sinks.
    """

    scaling: float
    window: int | None
    sinks: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTables:
    """A step's sequences as int32 arrays, for kernels that follow block tables themselves.

    token_begin: [num_seqs + 1], first row of each sequence in the packed batch, then the end of the last.
    context_len: [num_seqs].
    table_begin: [num_seqs], start of each sequence's blocks in a row of `block_ids`.
    block_ids: [num_tables, number of blocks], for each block table the blocks of all sequences, one after the
        other; contiguous.
    """

    token_begin: np.ndarray
    context_len: np.ndarray
    table_begin: np.ndarray
    block_ids: np.ndarray


class StepCache:
    """Caches values that the first layer of a step computes and the other layers reuse."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get_or_make(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return the value stored under `name`; call `make` for it the first time."""
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made


class AttentionStep(StepCache):
    """Attention inputs of one step, passed to every layer as a keyword argument of the model's forward."""

    def __init__(
        self, cache: KvCache, segments: Sequence[Segment], masks: CausalMasks, kernel: Callable[..., torch.Tensor]
    ) -> None:
        super().__init__()
        self.cache = cache
        self.kernel = kernel
        self.segments = segments
        self._masks = masks
        self._plans: dict[tuple[int, int | None], WindowPlan] = {}

    def slots_of(self, layer: int) -> TokenSlots:
        """Return the slots in which a layer stores the step's tokens, on the device."""
        return self.slots[self.cache.table_of[layer]]

    @cached_property
    def slots(self) -> tuple[TokenSlots, ...]:
        """The slots of the step's tokens in each block table, on the device."""
        block_ids, offsets = self._block_and_offset
        on_device = self._tensor(offsets)
        return tuple(TokenSlots(self._tensor(own), on_device) for own in block_ids)

    @cached_property
    def slot_mapping(self) -> np.ndarray:
        """Slot of each token, counted over all blocks, int64 [num_tables, num_tokens], for the C++
        kernels."""
        block_ids, offsets = self._block_and_offset
        return block_ids * self.cache.block_size_tokens + offsets

    @cached_property
    def _block_and_offset(self) -> tuple[np.ndarray, np.ndarray]:
        """Block id [num_tables, num_tokens] and offset inside the block [num_tokens] of each token, int64."""
        tables, size = self.tables, self.cache.block_size_tokens
        counts = np.diff(tables.token_begin)
        index = np.arange(tables.token_begin[-1], dtype=np.int64) + np.repeat(
            tables.context_len - tables.token_begin[1:], counts
        )
        # The kernels need each table's row in one piece, which indexing with [:, ...] would not give.
        block_ids = np.take(tables.block_ids, np.repeat(tables.table_begin, counts) + index // size, axis=1)
        return block_ids.astype(np.int64), index % size

    @cached_property
    def tables(self) -> SequenceTables:
        """The step's sequences as `SequenceTables`."""
        num_tables = self.cache.num_tables
        lengths = np.array([segment.block_ids.size // num_tables for segment in self.segments], dtype=np.int32)
        end = self.segments[-1].token_begin + self.segments[-1].num_tokens
        return SequenceTables(
            token_begin=np.array([*(segment.token_begin for segment in self.segments), end], dtype=np.int32),
            context_len=np.array([segment.context_len for segment in self.segments], dtype=np.int32),
            table_begin=(np.cumsum(lengths) - lengths).astype(np.int32),
            block_ids=np.ascontiguousarray(
                np.concatenate([segment.block_ids for segment in self.segments]).reshape(-1, num_tables).T,
                dtype=np.int32,
            ),
        )

    def tables_for_rows(self, rows: np.ndarray) -> SequenceTables:
        """Return tables in which each of these tokens is a sequence of one token.

        `rows`: rows of the packed batch, ascending. Each context ends with the token itself.
        """
        tables = self.tables
        of_row = np.searchsorted(tables.token_begin, rows, side="right") - 1
        behind = tables.token_begin[of_row + 1] - 1 - rows
        return SequenceTables(
            token_begin=np.arange(rows.size + 1, dtype=np.int32),
            context_len=(tables.context_len[of_row] - behind).astype(np.int32),
            table_begin=tables.table_begin[of_row],
            block_ids=tables.block_ids,
        )

    def observe(self, layer: int, attention_mask: Any, attention_params: AttentionParams) -> None:
        """Record what a layer asks for; called by every layer before it attends.

        Does nothing here; `verify_masks` overrides it.
        """

    def plan(self, layer: int, window: int | None) -> WindowPlan:
        """Return the attention work of a layer with this window.

        It is computed by the first layer with this window and the same block table.
        """
        table = self.cache.table_of[layer]
        plan = self._plans.get((table, window))
        if plan is None:
            decodes = [s for s in self.segments if s.num_tokens == 1]
            chunks = [s for s in self.segments if s.num_tokens > 1]
            plan = WindowPlan(
                decodes=tuple(self._groups(decodes, table, window)),
                chunks=tuple(self._chunk(s, table, window) for s in chunks),
            )
            self._plans[table, window] = plan
        return plan

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self.cache.device)

    def _first_seen(self, kv_index: int, window: int | None) -> int:
        return 0 if window is None else max(0, kv_index - window + 1)

    def _blocks_of(self, segment: Segment, table: int) -> np.ndarray:
        return segment.block_ids[table :: self.cache.num_tables]

    def _chunk(self, segment: Segment, table: int, window: int | None) -> Chunk:
        size = self.cache.block_size_tokens
        first_block = self._first_seen(segment.kv_begin, window) // size
        blocks = self._blocks_of(segment, table)[first_block : -(-segment.context_len // size)]
        tiles = []
        for begin in range(0, segment.num_tokens, TILE_TOKENS):
            end = min(begin + TILE_TOKENS, segment.num_tokens)
            kv_begin, kv_end = self._first_seen(segment.kv_begin + begin, window), segment.kv_begin + end
            tiles.append(
                Tile(
                    token_begin=segment.token_begin + begin,
                    token_end=segment.token_begin + end,
                    kv_begin=kv_begin - first_block * size,
                    kv_end=kv_end - first_block * size,
                    mask=self._masks.tile(end - begin, kv_end - kv_begin, window),
                )
            )
        return Chunk(blocks=BlockRows(self._tensor(blocks)[None]), tiles=tuple(tiles))

    def _groups(self, segments: Sequence[Segment], table: int, window: int | None) -> list[DecodeGroup]:
        """Group decodes by context length, longest first.

        The shortest context of a group is almost as long as the longest, and the gathered KV stays within a
        limit.
        """
        size = self.cache.block_size_tokens
        token_bytes = self._gathered_token_bytes
        spans = sorted(
            ((s, self._first_seen(s.kv_begin, window) // size) for s in segments),
            key=lambda span: -self._num_blocks(*span),
        )
        groups: list[DecodeGroup] = []
        begin = 0
        while begin < len(spans):
            longest = self._num_blocks(*spans[begin])
            most = max(1, _MAX_GROUP_BYTES // (longest * size * token_bytes))
            end = begin + 1
            while end < min(len(spans), begin + most) and self._num_blocks(*spans[end]) >= min(
                longest - 2, longest * 0.8
            ):
                end += 1
            groups.append(self._group(spans[begin:end], table, longest, window))
            begin = end
        return groups

    @cached_property
    def _gathered_token_bytes(self) -> int:
        """Bytes of a gathered token's keys and values, in the largest layer."""
        return max(2 * kv.num_kv_heads * kv.head_dim for kv in self.cache.layers) * self.cache.dtype.itemsize

    def _num_blocks(self, segment: Segment, first_block: int) -> int:
        return -(-segment.context_len // self.cache.block_size_tokens) - first_block

    def _group(self, spans: Sequence[tuple[Segment, int]], table: int, longest: int, window: int | None) -> DecodeGroup:
        size = self.cache.block_size_tokens
        tables = np.empty((len(spans), longest), dtype=np.int64)
        lengths = np.empty(len(spans), dtype=np.int64)
        firsts = np.empty(len(spans), dtype=np.int64)
        own_slots = np.empty(len(spans), dtype=np.int64)
        for row, (segment, first_block) in enumerate(spans):
            own = self._num_blocks(segment, first_block)
            tables[row, :own] = self._blocks_of(segment, table)[first_block : first_block + own]
            # padding reads the sequence's own memory, never another sequence's
            tables[row, own:] = tables[row, 0]
            lengths[row] = segment.context_len - first_block * size
            firsts[row] = self._first_seen(segment.kv_begin, window) - first_block * size
            own_slots[row] = own * size if own > 1 else longest * size
        slots = np.arange(longest * size)[None, :]
        hidden = (slots >= lengths[:, None]) | (slots < firsts[:, None])
        # A hidden slot adds exp(-inf) = 0 times its value, which is NaN if the value is NaN. Slots that were
        # never written may hold NaN, so they are zeroed. Padding blocks repeat the first block. All of that
        # block is written, unless it is also the last.
        stale_seqs, stale_slots = np.nonzero((slots >= lengths[:, None]) & (slots < own_slots[:, None]))
        mask = None
        if hidden.any():
            mask = torch.zeros(hidden.shape, dtype=self.cache.dtype).masked_fill_(
                torch.from_numpy(hidden), float("-inf")
            )
            mask = mask[:, None, None, :].to(self.cache.device)
        return DecodeGroup(
            tokens=self._tensor(np.array([s.token_begin for s, _ in spans], dtype=np.int64)),
            blocks=BlockRows(self._tensor(tables)),
            mask=mask,
            stale_seqs=self._tensor(stale_seqs) if stale_seqs.size else None,
            stale_slots=self._tensor(stale_slots) if stale_seqs.size else None,
        )
