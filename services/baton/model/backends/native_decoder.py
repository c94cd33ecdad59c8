"""Calls the C++ decoder: all layers of a decoder in one call, over weights that are packed once."""

import ctypes
import weakref
from collections.abc import Sequence

import torch

from baton.core.errors import LayoutMismatch
from baton.model.attention.attention_inputs import AttentionStep
from baton.model.backends.decoder_layers import DecoderLayer
from baton.model.backends.packed_experts import PackedExperts
from baton.model.device.kv_tensors import KvCache
from baton.model.forms.decoder_form import DecoderForm, ExpertsForm
from baton.model.kernels.cpu.gemm_args import GemmArgs
from baton.model.kernels.cpu.kernel_args import (
    MAX_HEAD_DIM,
    AttentionArgs,
    GateArgs,
    LayerKvArgs,
    NormArgs,
    RopeArgs,
    RotaryTable,
    attention_args,
    data_address,
    layer_kv_args,
    rope_args,
    set_tables,
    set_tokens,
)
from baton.model.kernels.cpu.kernel_library import Kernels, gate_args, norm_args, rotary_table
from baton.model.kernels.layer_values import Rotary
from baton.model.linear.packed_linear import PackedGemm

_ALIGNMENT = 64
"""Elements by which a place in scratch memory may be moved to a cache line."""


class _LayerArgs(ctypes.Structure):
    """ctypes mirror of `LayerArgs` in decoder.cpp."""

    _fields_ = [
        *((name, GemmArgs) for name in ("qkv", "o", "gate_up", "down")),
        ("experts", ctypes.c_void_p),
        *((name, NormArgs) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, NormArgs) for name in ("q_norm", "k_norm")),
        ("sinks", ctypes.c_void_p),
        ("kv", LayerKvArgs),
        *((name, ctypes.c_int32) for name in ("table", "window", "rotary", "norms_all_heads")),
        ("gate", GateArgs),
        *((name, ctypes.c_float) for name in ("scale", "multiplier")),
    ]


class _DecoderArgs(ctypes.Structure):
    """ctypes mirror of `DecoderArgs` in decoder.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("layers", "rotary_tables", "hidden", "out", "scratch"),
                *("gemm_scratch", "is_finite", "rows"),
            )
        ),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens", "table_stride")),
        ("num_layers", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("final_norm", NormArgs),
        *((name, AttentionArgs) for name in ("attention", "rows_attention")),
        ("rope", RopeArgs),
    ]


class NativeDecoder:
    """All layers and the final norm as one C++ call."""

    def __init__(self, kernels: Kernels, form: DecoderForm, layers: Sequence[DecoderLayer[PackedGemm]]) -> None:
        """`layers`: of `form`. Raises LayoutMismatch if their queries, keys and values have different shapes,
        or if the kernels do not take a mixture of experts."""
        shapes = {(layer.qkv.n, layer.o.k) for layer in layers}
        if len(shapes) != 1:
            raise LayoutMismatch(f"layers have {sorted(shapes)} numbers a token (QKV, attention); must be one pair")
        self._kernels = kernels
        self._layers = layers
        self._final_norm = form.final_norm
        self._experts = [
            PackedExperts(kernels, layer.form.mlp, form.dtype) if isinstance(layer.form.mlp, ExpertsForm) else None
            for layer in layers
        ]
        self._sinks = [
            None if layer.form.attention_params.sinks is None else layer.form.attention_params.sinks.float()
            for layer in layers
        ]
        first = layers[0]
        self._size = first.o.n
        self._scratch_columns = first.o.n + first.qkv.n + first.o.k + max(map(self._mlp_columns, range(len(layers))))
        self._gemm_row_bytes = max(self._row_bytes(index, form.dtype) for index in range(len(layers)))
        self._scratch = torch.empty(0)
        self._gemm_scratch = torch.empty(0, dtype=torch.uint8)
        self._args = (_LayerArgs * len(layers))(*map(self._layer_args, range(len(layers))))
        self._step_args = _DecoderArgs()
        self._cache: weakref.ref[KvCache] | None = None  # to which the arguments belong

    def __call__(
        self,
        hidden: torch.Tensor,
        step: AttentionStep,
        rotaries: Sequence[Rotary],
        query_scale: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers, write the step's KV, and return the normed last hidden states and `finite`.

        hidden [num_tokens, size]: the embeddings; overwritten.
        rotaries, query_scale: of the step, for the form's `rotaries` and `query_scale`.
        rows, ascending: tokens whose last hidden states are returned, [len(rows), size].
        `finite` is as in `ForwardOutput`. Raises LayoutMismatch if the cache belongs to a model of another
        shape.
        """
        cache = step.cache
        num_tokens, num_rows = len(hidden), rows.numel()
        if self._cache is None or self._cache() is not cache:
            self._bind(cache)
        # reused: page faults cost more than some products
        needed = num_tokens * self._scratch_columns + _ALIGNMENT
        if self._scratch.numel() < needed:
            self._scratch = hidden.new_empty(needed)
            self._gemm_scratch = torch.empty(num_tokens * self._gemm_row_bytes, dtype=torch.uint8)
        out = torch.empty_like(hidden)
        finite = torch.empty(num_tokens, dtype=torch.bool)
        tables, slots = step.tables, step.slot_mapping
        rotary_tables = (RotaryTable * max(1, len(rotaries)))(*map(rotary_table, rotaries))
        args = self._step_args
        args.rotary_tables = ctypes.addressof(rotary_tables)
        args.hidden, args.out, args.is_finite = hidden.data_ptr(), out.data_ptr(), finite.data_ptr()
        args.scratch, args.gemm_scratch = self._scratch.data_ptr(), self._gemm_scratch.data_ptr()
        args.rows, args.num_rows, args.num_tokens = rows.data_ptr(), num_rows, num_tokens
        args.table_stride = tables.block_ids.shape[1]
        set_tables(args.attention, tables)
        if num_rows < num_tokens:
            rows_tables = step.tables_for_rows(rows.numpy())
            set_tables(args.rows_attention, rows_tables)
        set_tokens(args.rope, slots, query_scale)
        self._kernels.decoder_forward(ctypes.byref(args))
        return out[:num_rows], finite

    def release_model_weights(self) -> None:
        """Free the model's own weights of experts; the packed copies stay."""
        for experts in self._experts:
            if experts is not None:
                experts.release_model_weights()

    def _bind(self, cache: KvCache) -> None:
        """Fill in what all steps over a cache share. Raises LayoutMismatch if it does not fit the layers."""
        self._cache = None
        num_heads, num_threads = self._num_heads(cache), self._kernels.num_threads
        for layer, kv, table in zip(self._args, cache.layers, cache.table_of, strict=True):
            layer.kv, layer.table = layer_kv_args(kv), table
        attention = self._attention_args(cache, num_heads)
        self._step_args = _DecoderArgs(
            layers=ctypes.addressof(self._args),
            num_layers=len(self._layers),
            size=self._size,
            final_norm=norm_args(self._final_norm),
            attention=attention,
            rows_attention=attention,
            rope=rope_args(cache, cache.layers[0], num_heads, num_threads),
        )
        self._cache = weakref.ref(cache)

    def _num_heads(self, cache: KvCache) -> int:
        """Return the number of query heads. Raises LayoutMismatch if the cache does not fit the layers."""
        first = self._layers[0]
        num_kv_heads, head_dim = cache.uniform_shape
        num_heads = first.o.k // head_dim
        if first.qkv.n != (num_heads + 2 * num_kv_heads) * head_dim or cache.num_layers != len(self._layers):
            raise LayoutMismatch(
                f"{len(self._layers)} layers with {first.qkv.n} outputs for queries and KV do not fit {cache.layout}"
            )
        if head_dim > MAX_HEAD_DIM:
            raise LayoutMismatch(f"heads of {head_dim} numbers; the kernels take at most {MAX_HEAD_DIM}")
        return num_heads

    def _attention_args(self, cache: KvCache, num_heads: int) -> AttentionArgs:
        """Return attention arguments with the strides of queries and outputs in decoder.cpp's scratch
        memory."""
        first, kv = self._layers[0], cache.layers[0]
        args = attention_args(cache, kv, num_heads, self._kernels.num_threads)
        args.q_token_stride, args.q_head_stride = first.qkv.n, kv.head_dim
        args.out_token_stride, args.out_head_stride = first.o.k, kv.head_dim
        return args

    def _mlp_columns(self, index: int) -> int:
        """Return the elements a token that `Scratch::mlp` of decoder.cpp needs for a layer."""
        layer, experts = self._layers[index], self._experts[index]
        if experts is not None:
            return experts.scratch_columns
        assert layer.gate_up is not None
        assert layer.down is not None
        return layer.gate_up.n + layer.down.k

    def _row_bytes(self, index: int, dtype: torch.dtype) -> int:
        """Return the bytes of scratch a token that the largest product of a layer needs."""
        experts = self._experts[index]
        own = [product.row_bytes(dtype) for product in self._layers[index].projections()]
        return max(own) if experts is None else max(*own, experts.row_bytes)

    def _layer_args(self, index: int) -> _LayerArgs:
        layer, experts = self._layers[index], self._experts[index]
        form = layer.form
        args = _LayerArgs(
            qkv=layer.qkv.args,
            o=layer.o.args,
            experts=None if experts is None else experts.address,
            before_attention=norm_args(form.before_attention),
            after_attention=norm_args(form.after_attention),
            before_mlp=norm_args(form.before_mlp),
            after_mlp=norm_args(form.after_mlp),
            q_norm=norm_args(form.head_norms.q),
            k_norm=norm_args(form.head_norms.k),
            sinks=data_address(self._sinks[index]),
            window=form.attention_params.window or 0,
            rotary=-1 if form.rotary is None else form.rotary,
            norms_all_heads=form.head_norms.over_all_heads,
            gate=gate_args(form.mlp.gate),
            scale=form.attention_params.scaling,
            multiplier=form.multiplier,
        )
        if layer.gate_up is not None and layer.down is not None:
            args.gate_up, args.down = layer.gate_up.args, layer.down.args
        return args
