"""Mirrors the argument structures of the C++ kernels with ctypes, and fills in what all layers of a step
share."""

import ctypes

import torch

from baton.model.attention.attention_inputs import SequenceTables
from baton.model.device.kv_tensors import KvCache

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtype codes of the C++ kernels, see numbers.h."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
"""Activation codes of the C++ kernels, see layers.h."""
MAX_HEAD_DIM = 1024
"""Largest head that the kernels rotate; `MAX_HEAD_DIM` of layers.h."""


class NormArgs(ctypes.Structure):
    """ctypes mirror of `NormArgs` in layers.h. Empty: no norm."""

    _fields_ = [("factor", ctypes.c_void_p), ("eps", ctypes.c_float)]


class AddAndNormArgs(ctypes.Structure):
    """ctypes mirror of `AddAndNormArgs` in layers.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "added", "out")),
        *((name, NormArgs) for name in ("after", "norm")),
        ("rows", ctypes.c_int64),
        ("multiplier", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("size", "num_threads", "dtype")),
    ]


class AttentionArgs(ctypes.Structure):
    """ctypes mirror of `AttentionArgs` in attention.h."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "out", "kv", "token_begin", "context_len", "table_begin", "tables", "sinks")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("q_token_stride", "q_head_stride", "out_token_stride", "out_head_stride")
        ),
        *((name, ctypes.c_int64) for name in ("block_stride", "v_offset")),
        *(
            (name, ctypes.c_int32)
            for name in ("num_seqs", "num_heads", "num_kv_heads", "head_dim", "block_size", "window")
        ),
        *((name, ctypes.c_int32) for name in ("num_threads", "dtype")),
        ("scale", ctypes.c_float),
    ]


class RotaryTable(ctypes.Structure):
    """ctypes mirror of `RotaryTable` in layers.h. Empty: nothing is rotated."""

    _fields_ = [("cosine", ctypes.c_void_p), ("sine", ctypes.c_void_p), ("half", ctypes.c_int32)]


class RopeArgs(ctypes.Structure):
    """ctypes mirror of `RopeArgs` in layers.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "kv", "slots", "query_scale")),
        *((name, NormArgs) for name in ("q_norm", "k_norm")),
        ("rotary", RotaryTable),
        *((name, ctypes.c_int64) for name in ("head_stride", "v_offset", "num_tokens")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "num_threads", "dtype")),
        ("norms_all_heads", ctypes.c_int32),
    ]


def data_address(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's data, or None without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def layer_kv_address(cache: KvCache, layer: int) -> int:
    """Return the address where a layer's first block begins."""
    return cache.blocks.data_ptr() + layer * cache.blocks.stride(1) * cache.blocks.element_size()


def attention_args(cache: KvCache, tables: SequenceTables, num_heads: int, num_threads: int) -> AttentionArgs:
    """Return the attention arguments that all layers of a step share.

    Queries, outputs, the layer's KV, window, scale and sinks are left empty.
    """
    blocks = cache.blocks
    return AttentionArgs(
        token_begin=tables.token_begin.ctypes.data,
        context_len=tables.context_len.ctypes.data,
        table_begin=tables.table_begin.ctypes.data,
        tables=tables.block_ids.ctypes.data,
        block_stride=blocks.stride(0),
        v_offset=blocks.stride(2),
        num_seqs=tables.context_len.size,
        num_heads=num_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        block_size=cache.block_size_tokens,
        num_threads=num_threads,
        dtype=DTYPES[cache.dtype],
    )


def rope_args(
    cache: KvCache, slots: torch.Tensor, query_scale: torch.Tensor | None, num_heads: int, num_threads: int
) -> RopeArgs:
    """Return the RoPE arguments that all layers of a step share.

    query_scale: float32 [num_tokens], or None. The layer's projection, KV, norms and table are left empty.
    """
    return RopeArgs(
        slots=slots.data_ptr(),
        query_scale=data_address(query_scale),
        head_stride=cache.blocks.stride(3),
        v_offset=cache.blocks.stride(2),
        num_tokens=slots.numel(),
        num_heads=num_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        num_threads=num_threads,
        dtype=DTYPES[cache.dtype],
    )
