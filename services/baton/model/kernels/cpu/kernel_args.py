"""Mirrors the argument structures of the C++ kernels with ctypes, and fills in what all layers of a step
share."""

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from baton.model.attention.attention_inputs import SequenceTables
from baton.model.device.kv_tensors import KvCache, LayerKv

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtype codes of the C++ kernels, see numbers.h."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
"""Activation codes of the C++ kernels, see layers.h."""
MAX_HEAD_DIM = 1024
"""Largest head that the kernels rotate; `MAX_HEAD_DIM` of layers.h."""


class NormArgs(ctypes.Structure):
    """ctypes mirror of `NormArgs` in layers.h. Empty: no norm."""

    _fields_ = [("factor", ctypes.c_void_p), ("eps", ctypes.c_float)]


class GateArgs(ctypes.Structure):
    """ctypes mirror of `GateArgs` in layers.h."""

    _fields_ = [("activation", ctypes.c_int32), *((name, ctypes.c_float) for name in ("alpha", "limit", "up_shift"))]


class AddAndNormArgs(ctypes.Structure):
    """ctypes mirror of `AddAndNormArgs` in layers.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "added", "out")),
        *((name, NormArgs) for name in ("after", "norm")),
        ("rows", ctypes.c_int64),
        ("multiplier", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("size", "num_threads", "dtype")),
    ]


class LayerKvArgs(ctypes.Structure):
    """ctypes mirror of `LayerKv` in layer_kv.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")]


class KvStridesArgs(ctypes.Structure):
    """ctypes mirror of `KvStrides` in layer_kv.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("block", "head", "scale_head")]


class AttentionArgs(ctypes.Structure):
    """ctypes mirror of `AttentionArgs` in attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "out")),
        ("kv", LayerKvArgs),
        *((name, ctypes.c_void_p) for name in ("token_begin", "context_len", "table_begin", "tables", "sinks")),
        *(
            (name, ctypes.c_int64)
            for name in ("q_token_stride", "q_head_stride", "out_token_stride", "out_head_stride")
        ),
        ("kv_strides", KvStridesArgs),
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
        ("qkv", ctypes.c_void_p),
        ("kv", LayerKvArgs),
        *((name, ctypes.c_void_p) for name in ("slots", "query_scale")),
        *((name, NormArgs) for name in ("q_norm", "k_norm")),
        ("rotary", RotaryTable),
        ("kv_strides", KvStridesArgs),
        ("num_tokens", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "num_threads", "dtype")
        ),
        ("norms_all_heads", ctypes.c_int32),
    ]


def data_address(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's data, or None without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def layer_kv_args(kv: LayerKv) -> LayerKvArgs:
    """Return the addresses of a layer's KV."""
    return LayerKvArgs(*map(data_address, (kv.keys, kv.values, kv.key_scales, kv.value_scales)))


def kv_strides_args(kv: LayerKv) -> KvStridesArgs:
    """Return the strides of a layer's KV in bytes. Layers of one shape have the same."""
    block, head = (stride * kv.keys.itemsize for stride in kv.keys.stride()[:2])
    scale_head = 0 if kv.key_scales is None else kv.key_scales.stride(1) * kv.key_scales.itemsize
    return KvStridesArgs(block, head, scale_head)


def attention_args(cache: KvCache, kv: LayerKv, num_heads: int, num_threads: int) -> AttentionArgs:
    """Return the attention arguments that all steps and all layers with the shape of `kv` share.

    The others are left empty, see `set_tables`.
    """
    return AttentionArgs(
        kv_strides=kv_strides_args(kv),
        num_heads=num_heads,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        block_size=cache.block_size_tokens,
        num_threads=num_threads,
        dtype=DTYPES[cache.dtype],
    )


def set_tables(args: AttentionArgs, tables: SequenceTables) -> None:
    """Set the sequences of a step. The blocks are those of block table 0."""
    args.token_begin, args.context_len, args.table_begin, args.tables = (
        array.ctypes.data for array in (tables.token_begin, tables.context_len, tables.table_begin, tables.block_ids)
    )
    args.num_seqs = tables.context_len.size


def rope_args(cache: KvCache, kv: LayerKv, num_heads: int, num_threads: int) -> RopeArgs:
    """Return the RoPE arguments that all steps and all layers with the shape of `kv` share.

    The others are left empty, see `set_tokens`.
    """
    return RopeArgs(
        kv_strides=kv_strides_args(kv),
        num_heads=num_heads,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        block_size=cache.block_size_tokens,
        num_threads=num_threads,
        dtype=DTYPES[cache.dtype],
    )


def set_tokens(args: RopeArgs, slots: npt.NDArray[np.int64], query_scale: torch.Tensor | None) -> None:
    """Set the tokens of a step.

    slots: those of one block table, or of all, see `AttentionStep.slot_mapping`. query_scale: float32
    [num_tokens], or None.
    """
    args.slots, args.query_scale, args.num_tokens = slots.ctypes.data, data_address(query_scale), slots.shape[-1]
