"""Fills a KV cache with numbers, and reads them back, whatever its layout."""

import torch

from baton.core.kv.kv_layout import KvLayout
from baton.model.device.kv_quantization import dequantize, quantize
from baton.model.device.kv_tensors import KvCache, LayerKv, uniform_layout


def small_layout(
    *,
    size: int = 16,
    layers: int = 2,
    heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    kv_dtype: str = "auto",
) -> KvLayout:
    """Return the layout of a model of this shape."""
    return uniform_layout(
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        block_size_tokens=size,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


def set_numbers(kv: LayerKv, numbers: torch.Tensor, at: tuple[object, ...] = ()) -> None:
    """Store keys and values [2, num_blocks, heads, block_size_tokens, dim], or a part `at` of them."""
    where = at or (slice(None),)
    parts = ((kv.keys, kv.key_scales, numbers[0]), (kv.values, kv.value_scales, numbers[1]))
    for stored, scales, part in parts:
        if scales is None:
            stored[where] = part.to(stored.dtype)
        else:
            stored[where], scales[where] = quantize(part)


def numbers_of(kv: LayerKv) -> torch.Tensor:
    """Return keys and values as attention sees them, in float32, in the shape of `set_numbers`."""
    parts = ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
    return torch.stack(
        [each.float() if scales is None else dequantize(each, scales, torch.float32) for each, scales in parts]
    )


def fill_with_random_numbers(cache: KvCache, seed: int = 1) -> None:
    """Fill all layers with normally distributed keys and values."""
    generator = torch.Generator().manual_seed(seed)
    for kv in cache.layers:
        set_numbers(kv, torch.randn(2, *kv.keys.shape, generator=generator))


def poison(cache: KvCache, block_id: int, slots: slice = slice(None)) -> None:
    """Make slots of a block read as NaN in all layers."""
    for kv in cache.layers:
        for stored, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales)):
            (stored if scales is None else scales)[block_id, :, slots] = float("nan")


def all_nan(cache: KvCache, block_id: int, layer: int | None = None) -> bool:
    """Return True if every number of a block, in one layer or all, reads as NaN."""
    layers = cache.layers if layer is None else cache.layers[layer : layer + 1]
    return all(bool(numbers_of(kv)[:, block_id].isnan().all()) for kv in layers)
