"""What the hardware allows, measured: products of matrices, and reading memory; and what a model needs of
both."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from baton.model.backends.fused_layers import PackedLinear
from baton.model.backends.native_decoder import PackedGemm
from baton.model.kernels.cpu.kernel_build import KernelsUnavailable
from baton.model.kernels.cpu.kernel_library import load_kernels

READ_BYTES = {"cpu": 2**29, "cuda": 2**30}
"""Far more than its caches hold."""
PRODUCTS = {
    "cpu": ((2048, 1024, 3072), (2048, 2048, 2048), (512, 1024, 4096)),
    "cuda": ((8192, 8192, 8192), (8192, 4096, 16384), (4096, 4096, 4096)),
}
"""(rows, inner, columns)"""
REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Of one device, per second: floating point operations of bfloat16 products, and bytes read."""

    flops: float
    bytes: float


def measured(num_threads: int, device: str = "cpu") -> Roofline:
    """The best of some products, each done in all ways that we know, and some ways to read: nothing here may
    be faster. `num_threads` of a CPU."""
    torch.set_num_threads(num_threads)
    num_bytes = READ_BYTES[device]
    flops = []
    with torch.inference_mode(), torch.device(device):
        for rows, inner, columns in PRODUCTS[device]:
            x = torch.randn(rows, inner, dtype=torch.bfloat16)
            module = nn.Linear(inner, columns, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            flops += [
                2 * rows * inner * columns / _best_s(partial(way, x)) for way in _ways(module, num_threads, device)
            ]
        read_s = _read_s(num_bytes)
    if device == "cuda":
        torch.cuda.empty_cache()  # the engines need the memory
    return Roofline(flops=max(flops), bytes=num_bytes / read_s)


def _ways(module: nn.Linear, num_threads: int, device: str) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """To multiply by one matrix: as it is; on a CPU also over packed weights, oneDNN's and ours, and in
    float32, which is faster than bfloat16 where that is emulated."""
    yield module
    if device == "cpu":
        yield PackedLinear(module)
        with suppress(KernelsUnavailable):
            yield PackedGemm(load_kernels(num_threads), module)
        in_floats = deepcopy(module).float()
        yield lambda x: in_floats(x.float())


def _read_s(num_bytes: int) -> float:
    memory = torch.ones(num_bytes // 4, dtype=torch.float32)
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
    """Of one model in bfloat16. `weight_params`: that take part in computing a token (the embedding as a
    table does not); `end_params` of them, the head and what is not for keys and values of the last layer,
    only where a token is to follow."""

    weight_params: int
    end_params: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def of(model: Path) -> "Needs":
        config = json.loads((model / "config.json").read_text())
        params = sum(_size(file) for file in model.glob("*.safetensors"))
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        embedding = config["vocab_size"] * hidden
        return Needs(
            weight_params=params - embedding if not config.get("tie_word_embeddings") else params,
            end_params=embedding + hidden * (2 * heads * head_dim + 3 * config["intermediate_size"]),
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=head_dim,
        )

    def prefill_flops(self, num_tokens: int) -> float:
        """Of the last layer and the head all but keys and values is needed for the last token alone.
        Attention for each pair of tokens, once as scores and once as sums."""
        attention = 4 * (self.num_layers - 1) * self.num_heads * self.head_dim * num_tokens * (num_tokens + 1) / 2
        return 2 * (self.weight_params - self.end_params) * num_tokens + 2 * self.end_params + attention

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def decode_bytes(self, num_seqs: int, context: float) -> float:
        """Of a step: all weights once, and each sequence's keys and values."""
        return 2 * self.weight_params + num_seqs * context * self.kv_bytes_per_token


def _size(file: Path) -> int:
    with safe_open(file, "pt") as tensors:  # type: ignore[no-untyped-call]
        return sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118
