"""Connects transformers models to paged attention and implements the reference attention kernel.

The attention function is registered under its own name in transformers' attention interface. No mask function
is registered under that name, so transformers builds no masks and passes None. The visible tokens follow from
the step and the layer's `sliding_window`. Any other argument that changes attention raises an error, because
ignoring it would silently change the model.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from baton.core.errors import ModelError
from baton.model.attention.attention_inputs import AttentionParams, AttentionStep

PAGED = "baton_paged"
"""Name of the attention implementation in transformers."""
STEP_ARGUMENT = "baton_step"
"""Keyword argument of the model's forward that carries the `AttentionStep`."""
_IGNORED_KEYWORDS = frozenset(
    """position_ids use_cache cache_position position_embeddings output_attentions output_hidden_states
    output_router_logits""".split()
)
"""Keywords that models pass through and that do not change attention.

RoPE is applied before it, and recorded outputs do not matter.
"""
_KEYWORD_MEANINGS: Mapping[str, str] = {
    "softcap": "a soft cap",
    "position_bias": "a position bias",
}
"""Keywords that change attention, and their meaning for error messages."""


class PagedKernel(Protocol):
    """Computes attention of one layer, see `paged_attention`."""

    def __call__(
        self,
        query: torch.Tensor,
        layer: int,
        step: AttentionStep,
        scaling: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor: ...


def paged_attention(
    query: torch.Tensor,
    layer: int,
    step: AttentionStep,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each query token to its own sequence's KV, up to and including its own index.

    query: [num_heads, num_tokens, head_dim].
    step.cache: the KV of these tokens is already written. `cache.layers[layer]` has its strided views.
    window: number of visible tokens, the current one included; None for all.
    sinks: [num_heads], a score per head that takes part in each softmax and has no value; None: no sinks.

    Returns [num_tokens, num_heads, head_dim]. Slots beyond a sequence's end may hold anything, also NaN; so
    may blocks wholly before the window of a sequence's first token of the step. This is the CPU reference for
    all other kernels. Source: PagedAttention, Kwon et al. 2023, section 4; sinks: Xiao et al. 2024.
    """
    cache, (num_heads, num_tokens, head_dim) = step.cache, query.shape
    plan = step.plan(layer, window)
    out = query.new_empty(num_tokens, num_heads, head_dim)
    for group in plan.decodes:
        num_seqs = group.tokens.numel()
        keys, values = cache.gather(layer, group.blocks)
        if group.stale_seqs is not None:
            keys[group.stale_seqs, :, group.stale_slots] = 0
            values[group.stale_seqs, :, group.stale_slots] = 0
        q = query[:, group.tokens].transpose(0, 1).reshape(num_seqs, keys.shape[1], -1, head_dim)
        own_sinks = None if sinks is None else sinks.view(1, keys.shape[1], -1, 1)
        attended = _softmax_attention(q, keys, values, group.mask, scaling, own_sinks)
        out[group.tokens] = attended.reshape(num_seqs, num_heads, head_dim)
    for chunk in plan.chunks:
        keys, values = cache.gather(layer, chunk.blocks)
        for tile in chunk.tiles:
            attended = _softmax_attention(
                query[None, :, tile.token_begin : tile.token_end],
                keys[:, :, tile.kv_begin : tile.kv_end],
                values[:, :, tile.kv_begin : tile.kv_end],
                tile.mask,
                scaling,
                None if sinks is None else sinks.view(1, num_heads, 1, 1),
            )
            out[tile.token_begin : tile.token_end] = attended[0].transpose(0, 1)
    return out


def _softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend query [batch, heads, rows, dim] to key and value [batch, kv_heads, tokens, dim].

    `mask`: additive. `sinks`: [1, heads, rows or 1, 1].
    """
    if sinks is None:
        is_grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=is_grouped)
    group = query.shape[1] // key.shape[1]
    key, value = (each.float().repeat_interleave(group, dim=1) for each in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * scaling
    if mask is not None:
        scores = scores + mask
    sinks = sinks.float()
    top = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sinks - top)
    return (weights / total @ value).to(query.dtype)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    baton_step: AttentionStep | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for a packed batch; the function that transformers calls in each layer.

    query: [1, num_heads, num_tokens, head_dim].
    key, value: [1, num_kv_heads, num_tokens, head_dim]; written to the cache first.
    s_aux, sinks: attention sinks, [num_heads], under one of the two names that models use.
    Returns ([1, num_tokens, num_heads, head_dim], None). Raises ModelError for any argument that paged
    attention does not support.
    """
    name = type(module).__name__
    if baton_step is None:
        raise ModelError(
            f"{name} does not pass keyword arguments to its attention, so it cannot be served from paged KV memory"
        )
    for keyword, argument in others.items():
        if argument is not None and keyword not in _IGNORED_KEYWORDS:
            meaning = _KEYWORD_MEANINGS.get(keyword, "an attention argument")
            raise ModelError(f"{name} asks for {meaning} ({keyword!r}), which paged attention does not support")
    if dropout:
        raise ModelError(f"{name} asks for dropout; a served model must be in evaluation mode")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ModelError(f"{name} is not causal; only causal attention can be paged")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < baton_step.cache.num_layers:
        raise ModelError(f"{name} has layer_idx {layer!r}; must be between 0 and {baton_step.cache.num_layers - 1}")
    kv = baton_step.cache.layers[layer]
    expected = (1, kv.num_kv_heads, query.shape[2], kv.head_dim)
    if tuple(key.shape) != expected or tuple(value.shape) != expected:
        raise ModelError(
            f"layer {layer} ({name}) caches keys {tuple(key.shape)} and values {tuple(value.shape)}, not {expected}: "
            "all layers need one number of KV heads and one head size, the same for keys and values"
        )
    sinks = s_aux if sinks is None else sinks
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise ModelError(f"{name} has attention sinks {tuple(sinks.shape)}; must be one per head, ({query.shape[1]},)")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    baton_step.observe(layer, attention_mask, AttentionParams(scaling, sliding_window, sinks))
    baton_step.cache.write(layer, baton_step.slots_of(layer), key[0], value[0])
    return baton_step.kernel(query[0], layer, baton_step, scaling, sliding_window, sinks)[None], None


AttentionInterface.register(PAGED, attend)
