"""Compares paged attention with a plain implementation, over memory that is NaN wherever nothing was
written."""

from random import Random

import numpy as np
import pytest
import torch

from baton.core.errors import LayoutMismatch, ModelError
from baton.core.kv.kv_layout import INT8, KvLayout
from baton.model.attention.attention_inputs import TILE_TOKENS, AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import PagedKernel, attend, paged_attention
from baton.model.device.kv_quantization import dequantize, quantize
from baton.model.device.kv_tensors import KvCache, TokenSlots
from tests.random_kv import all_nan, poison, small_layout

LAYERS, KV_HEADS, HEADS, HEAD_DIM, SIZE = 3, 2, 6, 8, 4


def layout(dtype: torch.dtype = torch.float32, kv_dtype: str = "auto") -> KvLayout:
    return small_layout(size=SIZE, layers=LAYERS, heads=KV_HEADS, dim=HEAD_DIM, dtype=dtype, kv_dtype=kv_dtype)


def nan_cache(
    num_blocks: int, dtype: torch.dtype = torch.float32, device: str = "cpu", kv_dtype: str = "auto"
) -> KvCache:
    cache = KvCache.zeros(layout(dtype, kv_dtype), num_blocks, device, dtype)
    cache.fill_with_nan()
    return cache


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention for the last len(query) tokens of a context.

    query [heads, n, dim], key and value [kv_heads, context, dim], sinks [heads] -> [n, heads, dim].
    """
    context, count = key.shape[1], query.shape[1]
    key, value = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (key, value))
    scores = query.double() @ key.transpose(1, 2) * scaling
    for row in range(count):
        own = context - count + row
        for other in range(context):
            if other > own or (window is not None and own - other >= window):
                scores[:, row, other] = -torch.inf
    if sinks is not None:  # one more key, with that score and a value of zero
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, count, 1)], dim=2)
        value = torch.cat([value, torch.zeros_like(value[:, :1])], dim=1)
    return (scores.softmax(dim=-1) @ value).transpose(0, 1).float()


def check_step(
    spans: list[tuple[int, int]],
    window: int | None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
    kernel: PagedKernel = paged_attention,
    kv_dtype: str = "auto",
    has_sinks: bool = False,
) -> torch.Tensor:
    """Run one step and compare it with the plain implementation; return the result on the CPU.

    `spans`: (existing KV, tokens of this step) of each sequence. The context is written first, to scattered
    blocks. Blocks wholly before a window are then NaN, because they may belong to other sequences by now.
    With KV in int8, the plain implementation attends to what the integers stand for.
    """
    torch.manual_seed(seed)
    rng = Random(seed)
    layer, scaling = 1, 0.4
    tables = [np.zeros(-(-(before + count) // SIZE), dtype=np.int64) for before, count in spans]
    cache = nan_cache(sum(len(t) for t in tables) + 2, dtype, device, kv_dtype)
    free = list(range(cache.num_blocks))
    rng.shuffle(free)
    for table in tables:
        table[:] = [free.pop() for _ in table]
    keys, values = ([torch.randn(KV_HEADS, sum(span), HEAD_DIM).to(dtype) for span in spans] for _ in range(2))
    masks = CausalMasks(cache.dtype, cache.device)

    def step_of(begins_and_counts: list[tuple[int, int, int]]) -> AttentionStep:
        segments, row = [], 0
        for i, begin, count in begins_and_counts:
            segments.append(
                Segment(
                    token_begin=row,
                    num_tokens=count,
                    kv_begin=begin,
                    block_ids=tables[i][: -(-(begin + count) // SIZE)],
                )
            )
            row += count
        step = AttentionStep(cache, segments, masks, kernel)
        cache.write(
            layer,
            step.slots_of(layer),
            torch.cat([keys[i][:, begin : begin + count] for i, begin, count in begins_and_counts], dim=1).to(device),
            torch.cat([values[i][:, begin : begin + count] for i, begin, count in begins_and_counts], dim=1).to(device),
        )
        return step

    before = [(i, 0, span[0]) for i, span in enumerate(spans) if span[0]]
    if before:
        step_of(before)
    step = step_of([(i, *span) for i, span in enumerate(spans)])
    for table, (existing, _) in zip(tables, spans, strict=True):
        if window is not None:
            for block_id in table[: max(0, existing + 1 - window) // SIZE]:
                poison(cache, int(block_id))
    queries = [torch.randn(HEADS, count, HEAD_DIM).to(dtype) for _, count in spans]
    sinks = torch.randn(HEADS) * 3 if has_sinks else None
    own_sinks = () if sinks is None else (sinks.to(device),)
    found = kernel(torch.cat(queries, dim=1).to(device), layer, step, scaling, window, *own_sinks).cpu()
    if kv_dtype == INT8:
        keys, values = ([dequantize(*quantize(x), torch.float32) for x in each] for each in (keys, values))
    expected = torch.cat(
        [written_out(q.float(), k, v, scaling, window, sinks) for q, k, v in zip(queries, keys, values, strict=True)]
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    untouched = set(range(cache.num_blocks)) - {int(b) for t in tables for b in t}
    assert all(all_nan(cache, b) for b in untouched)
    assert all(all_nan(cache, b, layer) for b in range(cache.num_blocks) for layer in (0, 2))
    return found


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 9, 100])
def test_decodes_and_chunks_together(window: int | None) -> None:
    check_step(
        [(0, 1), (1, 1), (3, 1), (4, 1), (7, 3), (0, 5), (19, 1), (20, 1), (40, 1), (5, 8), (0, 4), (31, 1)], window
    )


@pytest.mark.parametrize("window", [None, 7, TILE_TOKENS, TILE_TOKENS + 1])
def test_chunks_longer_than_a_tile(window: int | None) -> None:
    check_step([(0, 2 * TILE_TOKENS + 5), (13, TILE_TOKENS), (0, TILE_TOKENS + 1)], window)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int) -> None:
    rng = Random(seed)
    spans = [
        (rng.choice((0, rng.randint(0, 60))), rng.choice((1, 1, 1, rng.randint(1, 30))))
        for _ in range(rng.randint(1, 20))
    ]
    check_step(spans, rng.choice((None, rng.randint(1, 40))), seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    check_step([(0, 1), (7, 3), (19, 1), (3, 1), (0, 30)], 8, dtype=dtype)


@pytest.mark.parametrize("window", [None, 9])
def test_sinks(window: int | None) -> None:
    check_step([(0, 1), (7, 3), (19, 1), (3, 1), (0, 30), (140, 130)], window, has_sinks=True)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_masks_for_devices_begin_where_their_memory_does(num_queries: int) -> None:
    """CUDA kernels fail with a misaligned address otherwise."""
    mask = CausalMasks(torch.float32, torch.device("meta")).tile(num_queries, 13, None)
    assert (mask.shape, mask.stride(), mask.storage_offset()) == ((num_queries, 13), (13, 1), 0)


def test_decodes_are_grouped_by_similar_length() -> None:
    """A short context is not padded to the longest of the step."""
    cache = nan_cache(200)
    lengths = [400, 390, 3, 2, 100, 96]
    tables = [np.arange(-(-n // SIZE)) for n in lengths]
    segments = [
        Segment(token_begin=i, num_tokens=1, kv_begin=n - 1, block_ids=tables[i]) for i, n in enumerate(lengths)
    ]
    step = AttentionStep(cache, segments, CausalMasks(cache.dtype, cache.device), paged_attention)
    assert [sorted(group.tokens.tolist()) for group in step.plan(0, None).decodes] == [[0, 1], [4, 5], [2, 3]]
    assert [sorted(group.tokens.tolist()) for group in step.plan(0, 16).decodes] == [
        [0, 1, 4, 5],
        [2, 3],
    ]  # the window makes them equally long


def test_cache_views_match_layout_range_of() -> None:
    """Transports read at `KvLayout.range_of`, which must be the bytes that these views write."""
    memory = bytearray(layout().block_bytes * 5)
    cache = KvCache.over(memoryview(memory), layout())
    key, value = torch.randn(2, KV_HEADS, 2, HEAD_DIM).unbind()
    cache.write(2, TokenSlots(torch.tensor([3, 1]), torch.tensor([0, 2])), key, value)
    for component, tensor in (("k", key), ("v", value)):
        for head in range(KV_HEADS):
            for row, (block, offset) in enumerate(((3, 0), (1, 2))):
                begin, size = layout().range_of(block, 2, component, head)
                tokens = torch.frombuffer(memory[begin : begin + size], dtype=torch.float32).view(SIZE, HEAD_DIM)
                assert torch.equal(tokens[offset], tensor[head, row])
    assert cache.num_blocks == 5
    assert torch.equal(cache.layers[2].keys[3, :, 0], key[:, 0])


def test_block_copies_happen_in_order() -> None:
    cache = KvCache.zeros(layout(), 4)
    cache.memory[0] = 1
    cache.copy_blocks([(0, 1), (1, 2)])
    assert (cache.memory[2] == 1).all()
    assert (cache.memory[3] == 0).all()


def test_memory_that_does_not_fit_the_layout_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="must be a multiple"):
        KvCache.over(memoryview(bytearray(layout().block_bytes + 1)), layout())


class Attention(torch.nn.Module):
    is_causal = True
    layer_idx = 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"s_aux": torch.zeros(1)}, "one per head"),
        ({"sinks": torch.zeros(1, HEADS, 1, 1)}, "one per head"),
        ({"softcap": 30.0}, "soft cap"),
        ({"something_new": 0}, "something_new"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "causal"),
        ({"baton_step": None}, "pass keyword arguments"),
    ],
)
def test_unsupported_attention_arguments_are_refused(arguments: dict[str, object], named: str) -> None:
    cache = nan_cache(1)
    segment = Segment(token_begin=0, num_tokens=1, kv_begin=0, block_ids=np.zeros(1, dtype=np.int64))
    step = AttentionStep(cache, [segment], CausalMasks(cache.dtype, cache.device), paged_attention)
    query, key = torch.zeros(1, HEADS, 1, HEAD_DIM), torch.zeros(1, KV_HEADS, 1, HEAD_DIM)
    harmless = {"baton_step": step, "position_ids": torch.zeros(1, 1), "use_cache": False, "softcap": None}
    attend(Attention(), query, key, key, None, **harmless)  # type: ignore[arg-type]
    attend(Attention(), query, key, key, None, **(harmless | {"s_aux": torch.zeros(HEADS)}))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=named):
        attend(Attention(), query, key, key, None, **(harmless | arguments))  # type: ignore[arg-type]


def test_keys_and_values_of_another_shape_are_refused() -> None:
    cache = nan_cache(1)
    segment = Segment(token_begin=0, num_tokens=1, kv_begin=0, block_ids=np.zeros(1, dtype=np.int64))
    step = AttentionStep(cache, [segment], CausalMasks(cache.dtype, cache.device), paged_attention)
    query, key = torch.zeros(1, HEADS, 1, HEAD_DIM), torch.zeros(1, KV_HEADS, 1, HEAD_DIM)
    with pytest.raises(ModelError, match="one head size"):
        attend(Attention(), query, key, key[..., :4], None, baton_step=step)
