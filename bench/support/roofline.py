"""Measures hardware limits (matrix products, memory bandwidth) and computes what a model needs."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig

from baton.model.backends.fused_layers import PackedLinear
from baton.model.kernels.cpu.kernel_build import KernelsUnavailable
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.linear.packed_linear import PackedGemm
from baton.model.loading.text_part import text_config

READ_BYTES = {"cpu": 2**29, "cuda": 2**30}
"""Bytes to read, by device: far more than its caches hold."""
PRODUCTS = {
    "cpu": ((2048, 1024, 3072), (2048, 2048, 2048), (512, 1024, 4096)),
    "cuda": ((8192, 8192, 8192), (8192, 4096, 16384), (4096, 4096, 4096)),
}
"""Matrix products to time, by device: (rows, inner, columns)."""
REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Hardware limits of one device.

    flops: floating-point operations per second of bfloat16 products.
    bytes: bytes read from memory per second.
    """

    flops: float
    bytes: float


def measured(num_threads: int, device: str = "cpu", read_bytes: int | None = None) -> Roofline:
    """Measure the roofline: the best rate over several product shapes, implementations and read patterns.

    num_threads: threads on a CPU. read_bytes: size of the buffer to read; None for more than caches hold.
    """
    torch.set_num_threads(num_threads)
    num_bytes = read_bytes or READ_BYTES[device]
    flops = []
    with torch.inference_mode(), torch.device(device):
        for rows, inner, columns in PRODUCTS[device]:
            x = torch.randn(rows, inner, dtype=torch.bfloat16)
            module = nn.Linear(inner, columns, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            flops += [
                2 * rows * inner * columns / _best_s(partial(product, x))
                for product in _product_implementations(module, num_threads, device)
            ]
        reading_s = read_s(num_bytes)
    if device == "cuda":
        torch.cuda.empty_cache()  # the engines need the memory
    return Roofline(flops=max(flops), bytes=num_bytes / reading_s)


def _product_implementations(
    module: nn.Linear, num_threads: int, device: str
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield implementations of a product with one matrix.

    On a CPU these include packed weights (oneDNN's and Baton's) and float32, which is faster than bfloat16 on
    processors that emulate bfloat16.
    """
    yield module
    if device == "cpu":
        yield PackedLinear(module)
        with suppress(KernelsUnavailable):
            yield PackedGemm(load_kernels(num_threads), module)
        in_floats = deepcopy(module).float()
        yield lambda x: in_floats(x.float())


def read_s(num_bytes: int) -> float:
    """Return the seconds that the fastest of some ways takes to read this many bytes of memory."""
    memory = torch.ones(num_bytes // 16_384 * 4096, dtype=torch.float32)
    rows, vector = memory.view(-1, 4096), torch.ones(4096)
    return min(_best_s(read) for read in (memory.sum, memory.max, lambda: torch.mv(rows, vector)))


def _best_s(run: Callable[[], object]) -> float:
    def done() -> None:
        run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    done()
    took = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        done()
        took.append(time.perf_counter() - began_s)
    return min(took)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Operations and bytes that one model needs.

    weight_params: parameters used to compute a token, without the embedding table.
    end_params: the part of them that is needed only for tokens that are sampled: the head, and the last layer
        without its key and value projections.
    weight_bits, kv_bits: bits of a weight, and of a number in the KV cache.
    windows: tokens that each layer sees; None for a layer that sees all. Empty if all layers do.
    """

    weight_params: int
    end_params: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weight_bits: float = 16
    kv_bits: float = 16
    windows: tuple[int | None, ...] = ()

    @staticmethod
    def of(model: Path, num_params: int | None = None) -> "Needs":
        """Read the needs of a dense model from its directory.

        num_params: all parameters, if the directory has no safetensors files that say it.
        """
        config: Any = text_config(AutoConfig.from_pretrained(model))
        params = num_params or sum(_size(file) for file in model.glob("*.safetensors"))
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        embedding = config.vocab_size * hidden
        return Needs(
            weight_params=params if config.tie_word_embeddings else params - embedding,
            end_params=embedding + hidden * (2 * heads * head_dim + 3 * config.intermediate_size),
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            windows=_windows(config),
        )

    def prefill_flops(self, num_tokens: int) -> float:
        """Return the operations of a prefill of `num_tokens` tokens.

        The head and most of the last layer count for the last token only. Attention counts two products per
        (query, key) pair that a layer's window allows: scores and weighted values.
        """
        pairs = sum(_num_pairs(num_tokens, seen) for seen in self._seen_by_layer(num_tokens)[:-1])
        attention = 4 * self.num_heads * self.head_dim * pairs
        return 2 * (self.weight_params - self.end_params) * num_tokens + 2 * self.end_params + attention

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        return round(self.num_layers * self._layer_kv_bytes)

    def decode_bytes(self, num_seqs: int, context: float) -> float:
        """Return the bytes that a decode step reads: all weights once, and the KV that each sequence sees."""
        kv_bytes = self._layer_kv_bytes * sum(self._seen_by_layer(context))
        return self.weight_bits / 8 * self.weight_params + num_seqs * kv_bytes

    @property
    def _layer_kv_bytes(self) -> float:
        """KV bytes of one token in one layer: a key and a value for each head."""
        return 2 * self.kv_bits / 8 * self.num_kv_heads * self.head_dim

    def _seen_by_layer(self, context: float) -> list[float]:
        """Return how many tokens each layer sees at most."""
        windows = self.windows or (None,) * self.num_layers
        return [context if window is None else min(context, window) for window in windows]


def _windows(config: Any) -> tuple[int | None, ...]:
    """Return the window of each layer, None for those that see all tokens; empty if all do."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return ()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _num_pairs(num_tokens: int, seen: float) -> float:
    """Return the (query, key) pairs of a prompt in a layer in which a token sees at most `seen` tokens."""
    return seen * (seen + 1) / 2 + (num_tokens - seen) * seen


def _size(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        return sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118
