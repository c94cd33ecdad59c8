"""Computes paged attention on a GPU with one Triton kernel that follows block tables, for chunks and decodes.

It replaces the gather and SDPA of the reference. A program takes some tokens of one sequence with all query
heads of one KV head, and goes over the sequence's blocks (online softmax as in FlashAttention, Dao et al.
2022). With few programs, such as when few sequences decode, each program's context is split and the partial
results are combined (Flash-Decoding). FlexAttention was not used: it needs the pages of one layer to be
adjacent, but a block holds all layers, so that one read moves all of them.

Importing this module imports triton, which comes with CUDA builds of torch. `TRITON_INTERPRET=1` runs it on a
CPU, slowly and in float32, because the interpreter has no bfloat16 products.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from baton.model.attention.attention_inputs import AttentionParams, AttentionStep
from baton.model.attention.graph_step import GraphStep
from baton.model.device.async_copy import upload
from baton.model.device.kv_tensors import KvCache

CHUNK_ROWS = 64
"""Query rows per program for prompt chunks: tokens times query heads per KV head."""
DECODE_ROWS = 16
"""Query rows per program for decodes: the minimum of `tl.dot`."""
KEYS = 64
"""Keys per iteration of a program."""
PROGRAMS_WANTED = 256
"""Number of programs below which contexts are split: about two per multiprocessor of a large GPU."""
MAX_SPLITS = 32
MIN_SPLIT_TOKENS = 256
LONG_TOKENS = 2 * MIN_SPLIT_TOKENS + 1
"""Length of a context that is split, unevenly; for verification."""


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # triton reads the types of the call
    query, keys, values, key_scales, value_scales, out, maxima, sums, sinks,
    tile_token, tile_count, tile_position, tile_table, block_ids,
    query_head_stride, query_token_stride,
    block_stride, kv_head_stride, scale_block_stride, scale_head_stride,
    scale,
    window,
    num_heads,
    block_size: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr, group: tl.constexpr,
    num_rows: tl.constexpr, num_keys: tl.constexpr, num_splits: tl.constexpr, has_window: tl.constexpr,
    has_scales: tl.constexpr, has_sinks: tl.constexpr, widen: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token, count = tl.load(tile_token + tile), tl.load(tile_count + tile)
    position, table = tl.load(tile_position + tile), tl.load(tile_table + tile)

    rows = tl.arange(0, num_rows)
    token, head = rows // group, kv_head * group + rows % group
    is_row = token < count
    dims = tl.arange(0, padded_dim)
    is_dim = dims < head_dim
    q_at = head[:, None] * query_head_stride + (first_token + token)[:, None] * query_token_stride + dims[None, :]
    q = tl.load(query + q_at, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    if widen:
        q = q.to(tl.float32)

    end = position + count
    begin, first_seen = 0, 0
    if has_window:
        first_seen = tl.maximum(position - window + 1, 0)  # blocks before it may be missing
        begin = first_seen // num_keys * num_keys
    length = tl.cdiv(tl.cdiv(end - begin, num_keys), num_splits) * num_keys
    begin = begin + split * length
    stop = tl.minimum(begin + length, end)

    best = tl.full([num_rows], float("-inf"), tl.float32)
    total = tl.zeros([num_rows], tl.float32)
    if has_sinks:  # the softmax begins with the sink, in the first split
        best = tl.where(split == 0, tl.load(sinks + head).to(tl.float32), best)
        total += tl.where(split == 0, 1.0, 0.0)
    mixed = tl.zeros([num_rows, padded_dim], tl.float32)
    for start in range(begin, stop, num_keys):
        slots = start + tl.arange(0, num_keys)
        is_slot = (slots < stop) & (slots >= first_seen)
        block = tl.load(block_ids + table + slots // block_size, mask=is_slot, other=0).to(tl.int64)
        at = block * block_stride + kv_head * kv_head_stride + (slots % block_size) * head_dim
        key = tl.load(keys + at[None, :] + dims[:, None], mask=is_slot[None, :] & is_dim[:, None], other=0)
        scores = tl.dot(q, key.to(q.dtype), input_precision="ieee") * scale
        scale_at = block * scale_block_stride + kv_head * scale_head_stride + slots % block_size
        if has_scales:  # integers up to 127 are exact in every dtype of q
            scores = scores * tl.load(key_scales + scale_at, mask=is_slot, other=0.0).to(tl.float32)[None, :]
        seen = (slots[None, :] <= (position + token)[:, None]) & is_slot[None, :]
        if has_window:
            seen = seen & (slots[None, :] > (position + token - window)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        now_best = tl.maximum(best, tl.max(scores, 1))
        safe_best = tl.where(now_best == float("-inf"), 0.0, now_best)  # a row that has seen no key yet
        weights = tl.exp(scores - safe_best[:, None])
        fade = tl.exp(best - safe_best)
        value = tl.load(values + at[:, None] + dims[None, :], mask=is_slot[:, None] & is_dim[None, :], other=0)
        total = total * fade + tl.sum(weights, 1)
        if has_scales:
            weights = weights * tl.load(value_scales + scale_at, mask=is_slot, other=0.0).to(tl.float32)[None, :]
        mixed = mixed * fade[:, None] + tl.dot(weights.to(q.dtype), value.to(q.dtype), input_precision="ieee")
        best = now_best

    if num_splits == 1:
        out_at = ((first_token + token) * num_heads + head)[:, None] * head_dim + dims[None, :]
        mean = mixed / total[:, None]
        tl.store(out + out_at, mean.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])
    else:
        part = ((first_token + token) * num_heads + head) * num_splits + split
        tl.store(out + part[:, None] * head_dim + dims[None, :], mixed, mask=is_row[:, None] & is_dim[None, :])
        tl.store(maxima + part, best, mask=is_row)
        tl.store(sums + part, total, mask=is_row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Work of each program, int32 on the device.

    token: row of its first token in the packed batch.
    count: number of tokens.
    position: KV index of its first token.
    table: start of its sequence's blocks in a row of `block_ids`.
    block_ids: [num_tables, ...].
    longest: the longest context among them, in tokens.
    """

    token: torch.Tensor
    count: torch.Tensor
    position: torch.Tensor
    table: torch.Tensor
    block_ids: torch.Tensor
    longest: int


def tiles_of(step: AttentionStep, tokens_a_tile: int) -> Tiles:
    """Return the tiles of all sequences of a step, each of at most `tokens_a_tile` tokens."""
    tables = step.tables
    counts = np.diff(tables.token_begin)
    num_tiles = -(-counts // tokens_a_tile)
    seq = np.repeat(np.arange(counts.size), num_tiles)
    first = (np.arange(seq.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tokens_a_tile
    device = step.cache.device

    def on_device(values: np.ndarray) -> torch.Tensor:
        return upload(np.ascontiguousarray(values, dtype=np.int32), device)

    return Tiles(
        token=on_device(tables.token_begin[seq] + first),
        count=on_device(np.minimum(tokens_a_tile, counts[seq] - first)),
        position=on_device(tables.context_len[seq] - counts[seq] + first),
        table=on_device(tables.table_begin[seq]),
        block_ids=on_device(tables.block_ids),
        longest=int(tables.context_len.max()),
    )


def splits_for(num_programs: int, longest: int) -> int:
    """Return over how many programs each context is split. A power of two, so that few kernels are
    compiled."""
    wanted = min(PROGRAMS_WANTED // max(1, num_programs), longest // MIN_SPLIT_TOKENS, MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def split_contexts(max_model_len: int) -> tuple[int, ...]:
    """Return one context length for each possible split, because each compiles its own kernel.

    The lengths are those before a prompt chunk of two tokens.
    """
    lengths = (MIN_SPLIT_TOKENS << bit for bit in range(1, MAX_SPLITS.bit_length()))
    return tuple(length for length in lengths if length + 2 <= max_model_len)


def triton_attention(
    query: torch.Tensor,
    layer: int,
    step: AttentionStep,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute paged attention; same shapes and results as `paged_attention.paged_attention`."""
    num_heads, num_tokens, _ = query.shape
    group = num_heads // step.cache.layers[layer].num_kv_heads
    is_decode = num_tokens == len(step.segments)
    rows = max(triton.next_power_of_2(group), DECODE_ROWS if is_decode else CHUNK_ROWS)
    tiles = step.get_or_make(("tiles", rows // group), lambda: tiles_of(step, rows // group))
    return attend_tiles(query, step.cache, layer, tiles, rows, AttentionParams(scaling, window, sinks))


def triton_decode(
    query: torch.Tensor,
    layer: int,
    step: GraphStep,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute paged attention for one token per sequence inside a CUDA graph.

    All inputs are read from tensors, so contexts may have any length at replay.
    """
    num_heads, num_seqs, _ = query.shape
    cache, decodes = step.cache, step.decodes

    def tiles() -> Tiles:
        rows = torch.arange(num_seqs, dtype=torch.int32, device=query.device)
        max_blocks = decodes.block_ids.shape[2]
        return Tiles(
            token=rows,
            count=torch.ones_like(rows),
            position=decodes.position,
            table=rows * max_blocks,
            block_ids=decodes.block_ids,
            longest=max_blocks * cache.block_size_tokens,
        )

    rows = max(triton.next_power_of_2(num_heads // cache.layers[layer].num_kv_heads), DECODE_ROWS)
    params = AttentionParams(scaling, window, sinks)
    return attend_tiles(query, cache, layer, step.get_or_make("tiles", tiles), rows, params)


def attend_tiles(
    query: torch.Tensor, cache: KvCache, layer: int, tiles: Tiles, rows: int, params: AttentionParams
) -> torch.Tensor:
    """Compute paged attention for given tiles, see `triton_attention`.

    `rows`: query rows per program.
    """
    kv = cache.layers[layer]
    num_heads, num_tokens, head_dim = query.shape
    splits = splits_for(tiles.token.numel() * kv.num_kv_heads, tiles.longest)
    shape = (num_tokens, num_heads, splits)
    out = query.new_empty(num_tokens, num_heads, head_dim)
    parts = out if splits == 1 else torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
    maxima, sums = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    query = query if query.stride(2) == 1 else query.contiguous()
    scales = (maxima, maxima) if kv.key_scales is None else (kv.key_scales, kv.value_scales)  # unused if there are none
    scale_strides = (0, 0) if kv.key_scales is None else kv.key_scales.stride()[:2]
    _attend[(tiles.token.numel(), kv.num_kv_heads, splits)](
        query, kv.keys, kv.values, *scales, parts, maxima, sums, query if params.sinks is None else params.sinks,
        tiles.token, tiles.count, tiles.position, tiles.table, tiles.block_ids[cache.table_of[layer]],
        query.stride(0), query.stride(1),
        kv.keys.stride(0), kv.keys.stride(1), *scale_strides,
        params.scaling,
        params.window or 0,
        num_heads,
        block_size=kv.keys.shape[2], head_dim=head_dim, padded_dim=max(16, triton.next_power_of_2(head_dim)),
        group=num_heads // kv.num_kv_heads, num_rows=rows, num_keys=KEYS, num_splits=splits,
        has_window=params.window is not None, has_scales=kv.key_scales is not None,
        has_sinks=params.sinks is not None,
        widen=query.device.type == "cpu",
    )  # fmt: skip
    if splits == 1:
        return out
    best = maxima.amax(dim=2, keepdim=True)
    weights = torch.exp(maxima - best)
    joined = (parts * weights[..., None]).sum(dim=2) / (sums * weights).sum(dim=2)[..., None]
    return joined.to(query.dtype)
