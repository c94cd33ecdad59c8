"""The layers of a decoder as one call; its matrix products over weights that are packed once. bfloat16, where the processor multiplies
pairs of it."""

import ctypes
from collections.abc import Sequence

import torch
from torch import nn

from baton.core.errors import LayoutMismatch
from baton.engine.model.attention_step import AttentionStep
from baton.engine.model.decoder_layers import DecoderLayer, take_weights
from baton.engine.model.native.library import DTYPES, AttentionArgs, HeadsArgs, Kernels

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
        *((name, ctypes.c_void_p) for name in ("layers", "final_norm", "hidden", "out", "scratch")),
        ("num_tokens", ctypes.c_int64),
        ("num_layers", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("attention", AttentionArgs),
        ("heads", HeadsArgs),
    ]


def has_products(kernels: Kernels) -> bool:
    """Whether the rest of this module can be used on this processor."""
    return bool(kernels.library.baton_has_products())


class Product:
    """x [rows, k] -> [rows, n], for the weights of several modules, one under the other."""

    def __init__(self, kernels: Kernels, *modules: nn.Linear) -> None:
        self._modules = modules
        weight = torch.cat([module.weight.data for module in modules])
        self.bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
        self.n, self.k = weight.shape
        if self.k % 2:
            raise LayoutMismatch(f"a product of {self.k} inputs, which are no pairs")
        self._words = torch.empty(-(-self.n // PANEL) * PANEL * self.k // 2, dtype=torch.int32)
        self._kernels = kernels
        pointer, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        pack = kernels.library.baton_pack
        pack.argtypes, pack.restype = [pointer, pointer, whole, whole, number], None
        pack(weight.data_ptr(), self._words.data_ptr(), self.n, self.k, kernels.num_threads)
        self._product = kernels.library.baton_product
        self._product.argtypes, self._product.restype = [pointer, ctypes.POINTER(_ProductArgs), pointer, whole, number], None
        self.args = _ProductArgs(self._words.data_ptr(), None if self.bias is None else self.bias.data_ptr(), self.n, self.k)

    def own_weights(self) -> None:
        take_weights(self._modules)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x is contiguous."""
        out = x.new_empty(x.shape[0], self.n)
        self._product(x.data_ptr(), ctypes.byref(self.args), out.data_ptr(), x.shape[0], self._kernels.num_threads)
        return out


class Decoder:
    """All layers and the last norm."""

    def __init__(self, kernels: Kernels, layers: Sequence[DecoderLayer[Product]], final_norm: torch.Tensor, eps: float) -> None:
        self._kernels = kernels
        self._layers = layers
        self._final_norm = final_norm
        self._eps = eps
        first = layers[0]
        self._scratch_columns = first.o.n + first.qkv.n + first.o.k + first.gate_up.n + first.down.k
        self._scratch = torch.empty(0, dtype=torch.bfloat16)
        self._args = (_LayerArgs * len(layers))(*(self._layer_args(layer) for layer in layers))
        self._decode = kernels.library.baton_decode
        self._decode.argtypes, self._decode.restype = [ctypes.POINTER(_DecoderArgs)], None

    def __call__(self, hidden: torch.Tensor, step: AttentionStep, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """hidden [num_tokens, size], the embedding's, is written over; cosine, sine [num_tokens, head_dim / 2] float32; the step's KV is
        written. Returns what the last norm makes of it, [num_tokens, size]. Raises LayoutMismatch if the cache is another model's."""
        cache, tables, slots = step.cache, step.tables, step.slots
        num_tokens, size = hidden.shape
        blocks, first = cache.blocks, self._layers[0]
        num_heads = first.o.k // cache.head_dim
        row = first.qkv.n
        if row != (num_heads + 2 * cache.num_kv_heads) * cache.head_dim or cache.num_layers != len(self._layers):
            raise LayoutMismatch(f"a decoder of {len(self._layers)} layers, {row} columns each, does not fit the cache {cache.layout}")
        for index, args in enumerate(self._args):
            args.kv = blocks.data_ptr() + index * blocks.stride(1) * blocks.element_size()
        if self._scratch.numel() < num_tokens * self._scratch_columns:  # fresh pages cost more than some products
            self._scratch = hidden.new_empty(num_tokens * self._scratch_columns)
        out = torch.empty_like(hidden)
        attention = AttentionArgs(
            token_begin=tables.token_begin.ctypes.data,
            context_len=tables.context_len.ctypes.data,
            table_begin=tables.table_begin.ctypes.data,
            tables=tables.block_ids.ctypes.data,
            q_token_stride=row,
            q_head_stride=cache.head_dim,
            out_token_stride=first.o.k,
            out_head_stride=cache.head_dim,
            block_stride=blocks.stride(0),
            v_offset=blocks.stride(2),
            num_seqs=tables.context_len.size,
            num_heads=num_heads,
            num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim,
            block_size=cache.block_size_tokens,
            num_threads=self._kernels.num_threads,
            dtype=DTYPES[hidden.dtype],
        )
        heads = HeadsArgs(
            slots=slots.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            head_stride=blocks.stride(3),
            v_offset=blocks.stride(2),
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim,
            num_threads=self._kernels.num_threads,
            dtype=DTYPES[hidden.dtype],
            eps=self._eps,
        )
        self._decode(
            _DecoderArgs(
                layers=ctypes.addressof(self._args),
                final_norm=self._final_norm.data_ptr(),
                hidden=hidden.data_ptr(),
                out=out.data_ptr(),
                scratch=self._scratch.data_ptr(),
                num_tokens=num_tokens,
                num_layers=len(self._layers),
                size=size,
                eps=self._eps,
                attention=attention,
                heads=heads,
            )
        )
        return out

    def _layer_args(self, layer: DecoderLayer[Product]) -> _LayerArgs:
        return _LayerArgs(
            qkv=layer.qkv.args,
            o=layer.o.args,
            gate_up=layer.gate_up.args,
            down=layer.down.args,
            input_norm=layer.input_norm.data_ptr(),
            post_norm=layer.post_norm.data_ptr(),
            q_norm=None if layer.q_norm is None else layer.q_norm.data_ptr(),
            k_norm=None if layer.k_norm is None else layer.k_norm.data_ptr(),
            window=layer.asked.window or 0,
            scale=layer.asked.scaling,
        )
