"""Exposes the C++ kernels as functions over tensors.

A call releases the GIL. The caller keeps all tensors alive during the call.
"""

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from baton.core.errors import LayoutMismatch
from baton.engine.constraints.token_bits import Bits, num_words
from baton.model.attention.attention_inputs import AttentionParams, AttentionStep, SequenceTables
from baton.model.attention.paged_attention import PagedKernel
from baton.model.device.kv_tensors import KvCache
from baton.model.kernels.cpu.kernel_args import (
    ACTIVATIONS,
    DTYPES,
    AddAndNormArgs,
    AttentionArgs,
    GateArgs,
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
from baton.model.kernels.cpu.kernel_build import KernelsUnavailable, build
from baton.model.kernels.layer_values import NO_HEAD_NORMS, Gate, HeadNorms, RmsNorm, Rotary
from baton.model.sampling.best_tokens import BestTokens
from baton.runtime.memory.anonymous_memory import allocate_anonymous


class WeightArena:
    """Allocates packed weights one after the other in huge pages.

    A step reads all weights. With 4 KiB pages the processor looks up an address and stops prefetching at the
    end of each page.
    """

    _CACHE_LINE_WORDS = 16

    def __init__(self, chunk_words: int = 2**24) -> None:
        """`chunk_words`: memory to map at a time, in int32 words. A larger weight gets a chunk of its own."""
        self._chunk_words = chunk_words
        self._free = torch.empty(0, dtype=torch.int32)

    def take(self, count: int) -> torch.Tensor:
        """Return int32 [count] that starts at a cache line. Raises OSError if there is no memory."""
        rounded = -(-count // self._CACHE_LINE_WORDS) * self._CACHE_LINE_WORDS
        if self._free.numel() < rounded:
            self._free = torch.frombuffer(allocate_anonymous(4 * max(rounded, self._chunk_words)), dtype=torch.int32)
        taken, self._free = self._free[:count], self._free[rounded:]
        return taken


class Kernels:
    """The functions of one compiled kernel library, for steps with `num_threads` threads."""

    def __init__(self, path: Path, num_threads: int) -> None:
        """Load the library. Raises KernelsUnavailable if that fails."""
        self.name = path.name  # covers sources, compiler, options and processor
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
        self._attention = library.baton_paged_attention
        self._attention.argtypes = [ctypes.POINTER(AttentionArgs)]
        self._rope = library.baton_rope_and_store_kv
        self._rope.argtypes = [ctypes.POINTER(RopeArgs)]
        pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._norm = library.baton_add_and_norm
        self._norm.argtypes = [ctypes.POINTER(AddAndNormArgs)]
        self._gate = library.baton_gate
        self._gate.argtypes = [pointer, pointer, int64, int32, ctypes.POINTER(GateArgs), int32, int32]
        self._best_tokens = library.baton_best_tokens
        self._best_tokens.argtypes = [*(pointer, int64, int64), *(pointer, pointer, int64), *[pointer] * 3, int32]
        # Called by model/linear and native_decoder.py, with addresses in place of tensors.
        self.packed_bytes, self.gemm_row_bytes = library.baton_packed_bytes, library.baton_gemm_row_bytes
        self.pack_weights, self.unpack_rows, self.gemm, self.decoder_forward = (
            library.baton_pack_weights,
            library.baton_unpack_rows,
            library.baton_gemm,
            library.baton_decoder_forward,
        )
        self.packed_bytes.argtypes, self.packed_bytes.restype = [pointer], int64
        self.gemm_row_bytes.argtypes, self.gemm_row_bytes.restype = [pointer, int32], int64
        self.pack_weights.argtypes = [pointer, pointer, pointer, int32]
        self.unpack_rows.argtypes, self.unpack_rows.restype = [pointer, pointer, int64, pointer, int32], int32
        self.gemm.argtypes = [pointer, *(pointer, int32) * 2, int64, pointer, int32]
        self.decoder_forward.argtypes = [pointer]
        for function in (
            self._attention,
            self._rope,
            self._norm,
            self._gate,
            self._best_tokens,
            self.pack_weights,
            self.gemm,
            self.decoder_forward,
        ):
            function.restype = None
        self.has_bf16_dot = bool(library.baton_has_bf16_dot())
        """True if this processor has the dot product of bfloat16 pairs (AVX512-BF16)."""
        self.num_threads = num_threads
        self.weight_arena = WeightArena()

    def attend(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        cache: KvCache,
        layer: int,
        tables: SequenceTables,
        params: AttentionParams,
    ) -> None:
        """Compute paged attention into `out`, see attention.h.

        query, out: [num_tokens, num_heads, head_dim], contiguous in the last dimension.
        Raises LayoutMismatch if the heads do not fit the cache.
        """
        kv = cache.layers[layer]
        if query.shape[2] != kv.head_dim or query.shape[1] % kv.num_kv_heads:
            raise LayoutMismatch(f"queries {tuple(query.shape)} do not fit {kv.num_kv_heads} KV heads of {kv.head_dim}")
        args = attention_args(cache, kv, query.shape[1], self.num_threads)
        set_tables(args, tables)
        args.q, args.q_token_stride, args.q_head_stride = query.data_ptr(), query.stride(0), query.stride(1)
        args.out, args.out_token_stride, args.out_head_stride = out.data_ptr(), out.stride(0), out.stride(1)
        args.kv = layer_kv_args(kv)
        args.tables = tables.block_ids[cache.table_of[layer]].ctypes.data
        args.window, args.scale = params.window or 0, params.scaling
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        args.sinks = data_address(sinks)
        self._attention(args)

    def rope_and_store_kv(
        self,
        qkv: torch.Tensor,
        cache: KvCache,
        layer: int,
        slots: npt.NDArray[np.int64],
        rotary: Rotary | None,
        norms: HeadNorms = NO_HEAD_NORMS,
        query_scale: torch.Tensor | None = None,
    ) -> None:
        """Apply norm and RoPE to queries and keys, and store keys and values in the cache.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous; its queries are changed in
        place.
        slots: [num_tables, num_tokens], see `AttentionStep.slot_mapping`.
        rotary: None if nothing is rotated.
        query_scale: float32 [num_tokens], factors of the rotated queries, or None.
        """
        kv = cache.layers[layer]
        num_heads = qkv.shape[1] // kv.head_dim - 2 * kv.num_kv_heads
        args = rope_args(cache, kv, num_heads, self.num_threads)
        set_tokens(args, slots[cache.table_of[layer]], query_scale)
        args.qkv, args.kv = qkv.data_ptr(), layer_kv_args(kv)
        args.q_norm, args.k_norm = norm_args(norms.q), norm_args(norms.k)
        args.norms_all_heads = norms.over_all_heads
        if rotary is not None:
            args.rotary = rotary_table(rotary)
        self._rope(args)

    def add_and_norm(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        norm: RmsNorm | None,
        *,
        after: RmsNorm | None = None,
        multiplier: float = 1.0,
    ) -> torch.Tensor:
        """Add `multiplier` times the norm `after` of `added` to `x` [num_tokens, size] in place.

        Return the norm `norm` of the sum, or `x` itself without a norm.
        """
        out = x if norm is None else torch.empty_like(x)
        rows, size = x.shape
        self._norm(
            AddAndNormArgs(
                x=x.data_ptr(),
                added=data_address(added),
                out=out.data_ptr(),
                after=norm_args(after),
                norm=norm_args(norm),
                rows=rows,
                multiplier=multiplier,
                size=size,
                num_threads=self.num_threads,
                dtype=DTYPES[x.dtype],
            )
        )
        return out

    def gate(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        """Join the halves of `x` [num_tokens, 2 * size], gate and up."""
        rows, size = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, size)
        self._gate(x.data_ptr(), out.data_ptr(), rows, size, gate_args(gate), self.num_threads, DTYPES[x.dtype])
        return out

    def find_best(self, logits: torch.Tensor, masked: npt.NDArray[np.intp], bits: Bits) -> BestTokens:
        """Find the most likely tokens, see `FindBest`.

        Raises LayoutMismatch for masks of another vocabulary.
        """
        rows, vocab_size = logits.shape
        if bits.shape != (len(masked), num_words(vocab_size)) and len(masked):
            raise LayoutMismatch(f"masks of shape {bits.shape} for {len(masked)} rows of {vocab_size} logits")
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        mask_of_row = np.full(rows, -1, dtype=np.int64)
        mask_of_row[masked] = np.arange(len(masked))
        bits = np.ascontiguousarray(bits)
        best = BestTokens(
            torch.empty(rows, dtype=torch.int64),
            torch.empty(rows, dtype=torch.bool),
            torch.empty(rows, dtype=torch.bool),
        )
        self._best_tokens(
            *(logits.data_ptr(), logits.stride(0), vocab_size),
            *(bits.ctypes.data, mask_of_row.ctypes.data, rows),
            *(best.token_ids.data_ptr(), best.are_finite.data_ptr(), best.have_choice.data_ptr(), self.num_threads),
        )
        return best


def norm_args(norm: RmsNorm | None) -> NormArgs:
    """Return the arguments of a norm, which must stay alive; empty ones without a norm."""
    return NormArgs() if norm is None else NormArgs(norm.factor.data_ptr(), norm.eps)


def gate_args(gate: Gate) -> GateArgs:
    """Return the arguments of a gate."""
    return GateArgs(ACTIVATIONS[gate.activation], gate.alpha, gate.limit, gate.up_shift)


def rotary_table(rotary: Rotary) -> RotaryTable:
    """Return the arguments of one table of a step, which must stay alive."""
    return RotaryTable(rotary.cosine.data_ptr(), rotary.sine.data_ptr(), rotary.cosine.shape[1])


def paged_kernel(kernels: Kernels) -> PagedKernel:
    """Return a `PagedKernel` that uses the C++ attention, for models that run by their own code."""

    def attention(
        query: torch.Tensor,
        layer: int,
        step: AttentionStep,
        scaling: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        by_token = query.transpose(0, 1)
        if by_token.stride(2) != 1:
            by_token = by_token.contiguous()
        out = query.new_empty(by_token.shape)
        kernels.attend(by_token, out, step.cache, layer, step.tables, AttentionParams(scaling, window, sinks))
        return out

    return attention


def load_kernels(num_threads: int) -> Kernels:
    """Load the kernel library, and compile it first if necessary. Raises KernelsUnavailable."""
    return Kernels(build(), num_threads)
