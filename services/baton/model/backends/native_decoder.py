"""The layers of a decoder as one call; its matrix products over weights that are packed once. bfloat16."""

import ctypes
from collections.abc import Sequence

import torch
from torch import nn

from baton.core.errors import LayoutMismatch
from baton.model.attention.attention_inputs import AttentionStep, Tables
from baton.model.backends.decoder_layers import DecoderLayer, take_weights
from baton.model.device.kv_tensors import KvCache
from baton.model.kernels.cpu.kernel_library import (
    DTYPES,
    AttentionArgs,
    HeadsArgs,
    Kernels,
    address,
    attention_args,
    heads_args,
    kv_of,
)

PANEL = 64
"""Outputs that are computed together; see product.h."""


class _ProductArgs(ctypes.Structure):
    """`ProductArgs` of decoder.cpp."""

    _fields_ = [("words", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("n", ctypes.c_int64), ("k", ctypes.c_int64)]


class _LayerArgs(ctypes.Structure):
    """`LayerArgs` of decoder.cpp."""

    _fields_ = [
        *((name, _ProductArgs) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "kv")),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


class _DecoderArgs(ctypes.Structure):
    """`DecoderArgs` of decoder.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("layers", "final_norm", "hidden", "out", "scratch", "is_finite", "rows")
        ),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens")),
        ("num_layers", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("eps", ctypes.c_float),
        *((name, AttentionArgs) for name in ("attention", "rows_attention")),
        ("heads", HeadsArgs),
    ]


class Product:
    """x [rows, k] -> [rows, n], for the weights of several modules, one under the other. `dtype`: of what
    comes out, bfloat16 or, not rounded, float32."""

    def __init__(self, kernels: Kernels, *modules: nn.Linear, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype
        self._modules = modules
        weight = torch.cat([module.weight.data for module in modules])
        self._bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
        self.n, self.k = weight.shape
        if self.k % 2:
            raise LayoutMismatch(f"a product of {self.k} inputs, which are no pairs")
        self._words = kernels.words.take(-(-self.n // PANEL) * PANEL * self.k // 2)
        self._kernels = kernels
        kernels.pack(weight.data_ptr(), self._words.data_ptr(), self.n, self.k, kernels.num_threads)
        self.args = _ProductArgs(self._words.data_ptr(), address(self._bias), self.n, self.k)

    def own_weights(self) -> None:
        take_weights(self._modules)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x is contiguous."""
        out = x.new_empty(x.shape[0], self.n, dtype=self._dtype)
        self._kernels.product(
            x.data_ptr(),
            ctypes.byref(self.args),
            out.data_ptr(),
            x.shape[0],
            self._kernels.num_threads,
            DTYPES[self._dtype],
        )
        return out


class NativeDecoder:
    """All layers and the last norm."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[DecoderLayer[Product]], final_norm: torch.Tensor, eps: float
    ) -> None:
        self._kernels = kernels
        self._layers = layers
        self._final_norm = final_norm
        self._eps = eps
        first = layers[0]
        self._scratch_columns = first.o.n + first.qkv.n + first.o.k + first.gate_up.n + first.down.k
        self._scratch = torch.empty(0, dtype=torch.bfloat16)
        self._args = (_LayerArgs * len(layers))(*(self._layer_args(layer) for layer in layers))

    def __call__(
        self, hidden: torch.Tensor, step: AttentionStep, cosine: torch.Tensor, sine: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [num_tokens, size], the embedding's, is written over; cosine, sine [num_tokens, head_dim /
        2] float32; rows, ascending: whose last hidden states are asked for; the step's KV is written. Returns
        what the last norm makes of those, [rows, size], and `finite` as in `Forwarded`. Raises LayoutMismatch
        if the cache is another model's."""
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
            layer.kv = kv_of(cache, index)
        if self._scratch.numel() < num_tokens * self._scratch_columns:  # fresh pages cost more than some products
            self._scratch = hidden.new_empty(num_tokens * self._scratch_columns)
        out = torch.empty_like(hidden)
        finite = torch.empty(num_tokens, dtype=torch.bool)
        tables = step.tables
        rows_tables = tables if num_rows == num_tokens else step.tables_of(rows.numpy())
        args = _DecoderArgs(
            layers=ctypes.addressof(self._args),
            final_norm=self._final_norm.data_ptr(),
            hidden=hidden.data_ptr(),
            out=out.data_ptr(),
            scratch=self._scratch.data_ptr(),
            is_finite=finite.data_ptr(),
            rows=rows.data_ptr(),
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_layers=len(self._layers),
            size=size,
            eps=self._eps,
            attention=self._attention_args(cache, tables, num_heads),
            rows_attention=self._attention_args(cache, rows_tables, num_heads),
            heads=heads_args(cache, slots, cosine, sine, num_heads, self._eps, self._kernels.num_threads),
        )
        self._kernels.decode(ctypes.byref(args))
        return out[:num_rows], finite

    def _attention_args(self, cache: KvCache, tables: Tables, num_heads: int) -> AttentionArgs:
        """With queries and outputs where `decoder.cpp` has them."""
        first = self._layers[0]
        args = attention_args(cache, tables, num_heads, self._kernels.num_threads)
        args.q_token_stride, args.q_head_stride = first.qkv.n, cache.head_dim
        args.out_token_stride, args.out_head_stride = first.o.k, cache.head_dim
        return args

    def _layer_args(self, layer: DecoderLayer[Product]) -> _LayerArgs:
        return _LayerArgs(
            qkv=layer.qkv.args,
            o=layer.o.args,
            gate_up=layer.gate_up.args,
            down=layer.down.args,
            input_norm=layer.input_norm.data_ptr(),
            post_norm=layer.post_norm.data_ptr(),
            q_norm=address(layer.q_norm),
            k_norm=address(layer.k_norm),
            window=layer.asked.window or 0,
            scale=layer.asked.scaling,
        )
