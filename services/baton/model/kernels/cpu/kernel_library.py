"""The kernels as functions over tensors. A call releases the interpreter's lock; every tensor is kept alive
by its caller."""

import ctypes
from pathlib import Path

import torch

from baton.core.errors import LayoutMismatch
from baton.model.attention.attention_inputs import Asked, AttentionStep, Tables
from baton.model.attention.paged_attention import PagedKernel
from baton.model.device.kv_tensors import KvCache
from baton.model.kernels.cpu.kernel_build import NoKernels, build
from baton.runtime.process.anonymous_memory import allocate_anonymous

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class AttentionArgs(ctypes.Structure):
    """`AttentionArgs` of attention.h."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "out", "kv", "token_begin", "context_len", "table_begin", "tables")
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


class HeadsArgs(ctypes.Structure):
    """`HeadsArgs` of layers.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "kv", "slots", "cosine", "sine", "q_weight", "k_weight")),
        *((name, ctypes.c_int64) for name in ("head_stride", "v_offset", "num_tokens")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "num_threads", "dtype")),
        ("eps", ctypes.c_float),
    ]


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def kv_of(cache: KvCache, layer: int) -> int:
    """Where a layer's first block begins."""
    return cache.blocks.data_ptr() + layer * cache.blocks.stride(1) * cache.blocks.element_size()


def attention_args(cache: KvCache, tables: Tables, num_heads: int, num_threads: int) -> AttentionArgs:
    """Of a step, for every layer: without queries, outputs, the layer's KV, its window and its scale."""
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


def heads_args(
    cache: KvCache,
    slots: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    num_heads: int,
    eps: float,
    num_threads: int,
) -> HeadsArgs:
    """Of a step, for every layer: without its product, its KV and its weights."""
    return HeadsArgs(
        slots=slots.data_ptr(),
        cosine=cosine.data_ptr(),
        sine=sine.data_ptr(),
        head_stride=cache.blocks.stride(3),
        v_offset=cache.blocks.stride(2),
        num_tokens=slots.numel(),
        num_heads=num_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        num_threads=num_threads,
        dtype=DTYPES[cache.dtype],
        eps=eps,
    )


class WeightArena:
    """Memory for packed weights, one after the other in huge pages: a step goes over all of them, and in
    pages of 4 KiB the processor has to look up an address, and stops guessing what comes next, at the end of
    each."""

    _CHUNK_WORDS = 2**24
    _LINE_WORDS = 16

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.int32)

    def take(self, count: int) -> torch.Tensor:
        """int32 [count], from the beginning of a cache line on. Raises OSError when there is no memory."""
        whole = -(-count // self._LINE_WORDS) * self._LINE_WORDS
        if self._left.numel() < whole:
            self._left = torch.frombuffer(allocate_anonymous(4 * max(whole, self._CHUNK_WORDS)), dtype=torch.int32)
        taken, self._left = self._left[:count], self._left[whole:]
        return taken


class Kernels:
    """One compiled library, for steps of `num_threads`."""

    def __init__(self, path: Path, num_threads: int) -> None:
        """Raises NoKernels if it cannot be loaded."""
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NoKernels(f"{path} cannot be loaded: {error}") from error
        self._attention = library.baton_paged_attention
        self._attention.argtypes = [ctypes.POINTER(AttentionArgs)]
        self._turn = library.baton_turn_and_store
        self._turn.argtypes = [ctypes.POINTER(HeadsArgs)]
        pointer, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._norm = library.baton_rms_norm
        self._norm.argtypes = [pointer, pointer, pointer, pointer, whole, number, ctypes.c_float, number, number]
        self._gate = library.baton_silu_gate
        self._gate.argtypes = [pointer, pointer, whole, number, number, number]
        # For `native/decoder.py`, as decoder.cpp wants them.
        self.pack, self.product, self.decode = library.baton_pack, library.baton_product, library.baton_decode
        self.pack.argtypes = [pointer, pointer, whole, whole, number]
        self.product.argtypes = [pointer, pointer, pointer, whole, number, number]
        self.decode.argtypes = [pointer]
        for function in (self._attention, self._turn, self._norm, self._gate, self.pack, self.product, self.decode):
            function.restype = None
        self.multiplies_pairs = bool(library.baton_multiplies_pairs())
        """Whether this processor has a dot product of pairs of bfloat16; else products are of floats."""
        self.num_threads = num_threads
        self.words = WeightArena()

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, cache: KvCache, layer: int, tables: Tables, asked: Asked
    ) -> None:
        """query, out [num_tokens, num_heads, head_dim], contiguous in the last dimension; see `attention.h`.
        Raises LayoutMismatch if the cache has other heads."""
        if query.shape[2] != cache.head_dim or query.shape[1] % cache.num_kv_heads:
            raise LayoutMismatch(
                f"queries {tuple(query.shape)} do not fit {cache.num_kv_heads} KV heads of {cache.head_dim}"
            )
        args = attention_args(cache, tables, query.shape[1], self.num_threads)
        args.q, args.q_token_stride, args.q_head_stride = query.data_ptr(), query.stride(0), query.stride(1)
        args.out, args.out_token_stride, args.out_head_stride = out.data_ptr(), out.stride(0), out.stride(1)
        args.kv = kv_of(cache, layer)
        args.window, args.scale = asked.window or 0, asked.scaling
        self._attention(args)

    def turn_and_store(
        self,
        qkv: torch.Tensor,
        cache: KvCache,
        layer: int,
        slots: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
    ) -> None:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: queries are normed and
        turned in place, keys on their way into the cache, where values go, too. slots [num_tokens]: see
        `AttentionStep`. cosine, sine [num_tokens, head_dim / 2] float32.
        """
        num_heads = qkv.shape[1] // cache.head_dim - 2 * cache.num_kv_heads
        args = heads_args(cache, slots, cosine, sine, num_heads, eps, self.num_threads)
        args.qkv, args.kv = qkv.data_ptr(), kv_of(cache, layer)
        args.q_weight, args.k_weight = address(q_weight), address(k_weight)
        self._turn(args)

    def rms_norm(self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [num_tokens, size] += added, in place; the normed sum is returned."""
        out = torch.empty_like(x)
        rows, size = x.shape
        more = None if added is None else added.data_ptr()
        self._norm(
            x.data_ptr(), more, weight.data_ptr(), out.data_ptr(), rows, size, eps, self.num_threads, DTYPES[x.dtype]
        )
        return out

    def silu_gate(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * size] -> silu(first half) * second half."""
        rows, size = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, size)
        self._gate(x.data_ptr(), out.data_ptr(), rows, size, self.num_threads, DTYPES[x.dtype])
        return out


def kernel_of(kernels: Kernels) -> PagedKernel:
    """For models that run by their own code; see `paged_attention`."""

    def attention(
        query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None
    ) -> torch.Tensor:
        by_token = query.transpose(0, 1)
        if by_token.stride(2) != 1:
            by_token = by_token.contiguous()
        out = query.new_empty(by_token.shape)
        kernels.attend(by_token, out, step.cache, layer, step.tables, Asked(scaling, window))
        return out

    return attention


def load_kernels(num_threads: int) -> Kernels:
    """Compiled if need be. Raises NoKernels."""
    return Kernels(build(), num_threads)
