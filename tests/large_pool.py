"""KV pools so large that offsets need more than 32 bits, and the same KV in a small pool, to compare with."""

import mmap
from random import Random

import numpy as np
import pytest
import torch

from baton.core.kv.kv_layout import KvLayout
from baton.model.attention.attention_inputs import AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import PagedKernel
from baton.model.device.kv_tensors import KvCache
from tests.random_kv import small_layout

VIRTUAL_BYTES = 20 << 30
"""Of a pool on a CPU, of which only the written pages take memory. More than 2**32 float32 numbers."""
GPU_BYTES = 9 << 30
"""Of a pool on a GPU. More than 2**32 numbers of 16 bits."""
SIZE, KV_HEADS, HEADS, HEAD_DIM, LAYERS = 16, 2, 6, 64, 2
SPANS = ((0, 1), (37, 1), (700, 1), (5, 40), (0, 20))
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def pool_layout(dtype: torch.dtype, kv_dtype: str) -> KvLayout:
    return small_layout(size=SIZE, layers=LAYERS, heads=KV_HEADS, dim=HEAD_DIM, dtype=dtype, kv_dtype=kv_dtype)


def large_cache(layout: KvLayout, dtype: torch.dtype, device: str = "cpu") -> KvCache:
    """Return a cache of `VIRTUAL_BYTES` whose pages are not allocated, or on a GPU one of `GPU_BYTES`."""
    if device != "cpu":
        return KvCache.zeros(layout, GPU_BYTES // layout.block_bytes, device, dtype)
    size = VIRTUAL_BYTES // layout.block_bytes * layout.block_bytes
    try:
        segment = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        pytest.skip(f"this system does not reserve {VIRTUAL_BYTES >> 30} GiB of addresses: {error}")
    return KvCache.over(memoryview(segment), layout, dtype)


def spread_blocks(count: int, num_blocks: int, seed: int = 0) -> list[int]:
    """Return different blocks of a large pool, the last one first, in no order."""
    inner = np.linspace(1, num_blocks - 2, count - 1).astype(int).tolist()
    Random(seed).shuffle(inner)
    return [num_blocks - 1, *inner]


def attended(kernel: PagedKernel, cache: KvCache, blocks: list[int]) -> torch.Tensor:
    """Write the same random KV into `blocks` and attend to it, in every layer; return all results."""
    generator = torch.Generator().manual_seed(3)
    masks = CausalMasks(cache.dtype, cache.device)
    free = iter(blocks)
    tables = [np.array([next(free) for _ in range(-(-sum(span) // SIZE))], dtype=np.int64) for span in SPANS]
    results = []
    for layer in range(LAYERS):
        for begins in ([(0, before) for before, _ in SPANS], list(SPANS)):
            own = [(i, begin, count) for i, (begin, count) in enumerate(begins) if count]
            counts = [count for _, _, count in own]
            starts = np.cumsum([0, *counts[:-1]]).tolist()
            segments = [
                Segment(
                    token_begin=start,
                    num_tokens=count,
                    kv_begin=begin,
                    block_ids=tables[i][: -(-(begin + count) // SIZE)],
                )
                for start, (i, begin, count) in zip(starts, own, strict=True)
            ]
            step = AttentionStep(cache, segments, masks, kernel)
            keys, values = (
                torch.randn(KV_HEADS, sum(counts), HEAD_DIM, generator=generator).to(cache.device, cache.dtype)
                for _ in range(2)
            )
            query = torch.randn(HEADS, sum(counts), HEAD_DIM, generator=generator).to(cache.device, cache.dtype)
            cache.write(layer, step.slots_of(layer), keys, values)
            results.append(kernel(query, layer, step, 0.125, None).float().cpu().flatten())
    return torch.cat(results)


def check_large_pool(kernel: PagedKernel, dtype: torch.dtype, kv_dtype: str, device: str = "cpu") -> None:
    """Compare attention over blocks of a large pool with attention over a small one: bytes and results."""
    layout = pool_layout(dtype, kv_dtype)
    large = large_cache(layout, dtype, device)
    count = sum(-(-sum(span) // SIZE) for span in SPANS)
    small = KvCache.zeros(layout, count + 1, device, dtype)
    blocks = spread_blocks(count, large.num_blocks)
    assert max(blocks) * layout.block_bytes > 1 << 32
    expected, found = attended(kernel, small, list(range(count))), attended(kernel, large, blocks)
    assert torch.equal(found, expected)
    assert expected.isfinite().all()
    for own, other in enumerate(blocks):
        assert torch.equal(large.memory[other], small.memory[own])
    large.copy_blocks([(blocks[0], large.num_blocks - 2)])
    assert torch.equal(large.memory[-2], small.memory[0])
