"""Calls the C++ decoder: all layers of a plain bfloat16 decoder in one call, over weights that are packed
once."""

import ctypes
from collections.abc import Sequence

import torch

from baton.core.errors import LayoutMismatch
from baton.model.attention.attention_inputs import AttentionStep, SequenceTables
from baton.model.backends.decoder_layers import DecoderLayer
from baton.model.device.kv_tensors import KvCache
from baton.model.kernels.cpu.gemm_args import GemmArgs
from baton.model.kernels.cpu.kernel_library import (
    AttentionArgs,
    Kernels,
    RopeArgs,
    attention_args,
    data_address,
    layer_kv_address,
    rope_args,
)
from baton.model.linear.packed_linear import PackedGemm


class _LayerArgs(ctypes.Structure):
    """ctypes mirror of `LayerArgs` in decoder.cpp."""

    _fields_ = [
        *((name, GemmArgs) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "kv")),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


class _DecoderArgs(ctypes.Structure):
    """ctypes mirror of `DecoderArgs` in decoder.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("layers", "final_norm", "hidden", "out", "scratch", "gemm_scratch", "is_finite", "rows")
        ),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens")),
        ("num_layers", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("eps", ctypes.c_float),
        *((name, AttentionArgs) for name in ("attention", "rows_attention")),
        ("rope", RopeArgs),
    ]


class NativeDecoder:
    """All layers and the final norm as one C++ call."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[DecoderLayer[PackedGemm]], final_norm: torch.Tensor, eps: float
    ) -> None:
        """`layers`: of one shape each. `final_norm`: its weight. `eps`: of all norms."""
        self._kernels = kernels
        self._layers = layers
        self._final_norm = final_norm
        self._eps = eps
        first = layers[0]
        self._scratch_columns = first.o.n + first.qkv.n + first.o.k + first.gate_up.n + first.down.k
        products = [product for layer in layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self._gemm_row_bytes = max(product.row_bytes(torch.bfloat16) for product in products)
        self._scratch = torch.empty(0, dtype=torch.bfloat16)
        self._gemm_scratch = torch.empty(0, dtype=torch.uint8)
        self._args = (_LayerArgs * len(layers))(*(self._layer_args(layer) for layer in layers))

    def __call__(
        self, hidden: torch.Tensor, step: AttentionStep, cosine: torch.Tensor, sine: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers, write the step's KV, and return the normed last hidden states and `finite`.

        hidden [num_tokens, size]: the embeddings; overwritten.
        cosine, sine [num_tokens, head_dim / 2] float32: from `rope_cos_sin`.
        rows, ascending: tokens whose last hidden states are returned, [len(rows), size].
        `finite` is as in `ForwardOutput`. Raises LayoutMismatch if the cache belongs to a model of another
        shape.
        """
        cache, slots = step.cache, step.slots
        (num_tokens, size), num_rows = hidden.shape, rows.numel()
        first = self._layers[0]
        num_heads = first.o.k // cache.head_dim
        if first.qkv.n != (num_heads + 2 * cache.num_kv_heads) * cache.head_dim or cache.num_layers != len(
            self._layers
        ):
            raise LayoutMismatch(
                f"{len(self._layers)} layers with {first.qkv.n} outputs for queries and KV do not fit {cache.layout}"
            )
        for index, layer in enumerate(self._args):
            layer.kv = layer_kv_address(cache, index)
        # reused: page faults cost more than some products
        if self._scratch.numel() < num_tokens * self._scratch_columns:
            self._scratch = hidden.new_empty(num_tokens * self._scratch_columns)
            self._gemm_scratch = torch.empty(num_tokens * self._gemm_row_bytes, dtype=torch.uint8)
        out = torch.empty_like(hidden)
        finite = torch.empty(num_tokens, dtype=torch.bool)
        tables = step.tables
        rows_tables = tables if num_rows == num_tokens else step.tables_for_rows(rows.numpy())
        args = _DecoderArgs(
            layers=ctypes.addressof(self._args),
            final_norm=self._final_norm.data_ptr(),
            hidden=hidden.data_ptr(),
            out=out.data_ptr(),
            scratch=self._scratch.data_ptr(),
            gemm_scratch=self._gemm_scratch.data_ptr(),
            is_finite=finite.data_ptr(),
            rows=rows.data_ptr(),
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_layers=len(self._layers),
            size=size,
            eps=self._eps,
            attention=self._attention_args(cache, tables, num_heads),
            rows_attention=self._attention_args(cache, rows_tables, num_heads),
            rope=rope_args(cache, slots, cosine, sine, num_heads, self._eps, self._kernels.num_threads),
        )
        self._kernels.decoder_forward(ctypes.byref(args))
        return out[:num_rows], finite

    def _attention_args(self, cache: KvCache, tables: SequenceTables, num_heads: int) -> AttentionArgs:
        """Return attention arguments with the strides of queries and outputs in decoder.cpp's scratch
        memory."""
        first = self._layers[0]
        args = attention_args(cache, tables, num_heads, self._kernels.num_threads)
        args.q_token_stride, args.q_head_stride = first.qkv.n, cache.head_dim
        args.out_token_stride, args.out_head_stride = first.o.k, cache.head_dim
        return args

    def _layer_args(self, layer: DecoderLayer[PackedGemm]) -> _LayerArgs:
        return _LayerArgs(
            qkv=layer.qkv.args,
            o=layer.o.args,
            gate_up=layer.gate_up.args,
            down=layer.down.args,
            input_norm=layer.input_norm.data_ptr(),
            post_norm=layer.post_norm.data_ptr(),
            q_norm=data_address(layer.q_norm),
            k_norm=data_address(layer.k_norm),
            window=layer.attention_params.window or 0,
            scale=layer.attention_params.scaling,
        )
