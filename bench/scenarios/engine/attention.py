"""Measures Baton's paged attention kernels on a CPU against the machine's roofline.

python -m bench attention [--repeats 15] [--kv-dtype auto|int8] [--against KERNEL_SOURCES]

The kernels run in bfloat16 with two threads, with the head counts of two models. KV is in bfloat16 or, with
--kv-dtype int8, in int8 with scales. A case is either a prompt chunk after a context or a batch of sequences
that decode one token each. As in a worker, the KV cache lies in huge pages and block ids are in random order.
Consecutive calls use different layers (LAYERS in all).

Each time is also given as a share of the roofline (`bench/support/roofline.py`). Prefill is compared with the
rate of matrix products, decode with the memory bandwidth for keys and values. With --against, the kernels of
another checkout (its folder services/baton/model/kernels/cpu) are measured in alternation.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from baton.model.attention.attention_inputs import AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import paged_attention
from baton.model.device.kv_tensors import KvCache, TokenSlots, uniform_layout
from baton.model.kernels.cpu.kernel_build import OPTIONS, SOURCES, build, find_compiler
from baton.model.kernels.cpu.kernel_library import Kernels, paged_kernel
from baton.runtime.memory.anonymous_memory import allocate_anonymous
from bench.support.roofline import measured
from bench.systems.baton_cluster import machine, table

THREADS = 2
LAYERS = 8
BLOCK = 16
NUM_BLOCKS = 1_400
HEADS = {"42M": (8, 4, 64), "0.6B": (16, 8, 128)}
"""(query heads, KV heads, head dimension) for each model size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention call to measure.

    num: sequences in the step.
    num_tokens: scheduled tokens of each sequence.
    context: total tokens of each sequence, the scheduled ones included.
    """

    num: int
    num_tokens: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.num} x 1 of {self.context}" if self.num_tokens == 1 else f"{self.num_tokens} of {self.context}"

    @property
    def num_pairs(self) -> float:
        """Number of (query, key) pairs under the causal mask."""
        return self.num * (
            self.num_tokens * (self.context - self.num_tokens) + self.num_tokens * (self.num_tokens + 1) / 2
        )


CASES = (
    *(
        Case(num=1, num_tokens=count, context=context)
        for count, context in ((128, 128), (512, 512), (512, 2048), (512, 8192), (64, 1024))
    ),
    *(Case(num=num, num_tokens=1, context=context) for num, context in ((1, 2048), (8, 2048), (32, 256))),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed calls per case (15)")
    parser.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto", help="of the KV cache (auto)")
    parser.add_argument("--against", type=Path, help="kernel source folder of another checkout to compare with")
    arguments = parser.parse_args()
    print(machine("torch"))
    limits = measured(THREADS)
    print(f"products {limits.flops / 1e9:,.0f} GFLOP/s, memory {limits.bytes / 1e9:.1f} GB/s\n")
    with libraries(arguments.against) as kernels:
        for name, (heads, kv_heads, dim) in HEADS.items():
            cache = random_cache(kv_heads, dim, arguments.kv_dtype)
            token_bytes = sum(c.size_bytes(BLOCK) for c in cache.layout.components_of(0)) / BLOCK
            rows = []
            for case in CASES:
                took_s = alternating_medians_s(kernels, cache, case, heads, arguments.repeats)
                is_decode = case.num_tokens == 1
                kv_bytes = token_bytes * case.num * case.context
                limit_s = kv_bytes / limits.bytes if is_decode else 4 * heads * dim * case.num_pairs / limits.flops
                roofline_kind = "memory" if is_decode else "products"
                shown = [f"{1e3 * each:.3f} ms, {limit_s / each:.0%} of {roofline_kind}" for each in took_s]
                rows.append([case.name, *shown, *([f"{took_s[1] / took_s[0]:.2f}"] if len(took_s) > 1 else [])])
            head = [
                f"{name}: tokens of context",
                "Baton",
                *(["--against", "times as fast"] if len(kernels) > 1 else []),
            ]
            print(table(head, rows) + "\n")


@contextmanager
def libraries(against: Path | None) -> Iterator[list[Kernels]]:
    """Yield this checkout's kernels and, if `against` is given, those built from its sources.

    The second library is compiled with its namespace renamed. Otherwise the dynamic linker would merge inline
    functions of the same name, and both libraries would run the same code.
    """
    with tempfile.TemporaryDirectory() as scratch:
        found = [Kernels(build(), THREADS)]
        if against is not None:
            path = Path(scratch) / "other.so"
            command = [
                find_compiler(),
                *OPTIONS,
                "-Dbaton=other",
                *(str(against / name) for name in SOURCES),
                "-o",
                str(path),
            ]
            subprocess.run(command, check=True)
            found.append(Kernels(path, THREADS))
        yield found


def random_cache(kv_heads: int, dim: int, kv_dtype: str = "auto") -> KvCache:
    """Return a KV cache filled with random numbers, quantised if `kv_dtype` is int8."""
    layout = uniform_layout(
        model_fingerprint="bench",
        tokenizer_fingerprint="bench",
        block_size_tokens=BLOCK,
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
    )
    memory = memoryview(allocate_anonymous(NUM_BLOCKS * layout.block_bytes))
    cache = KvCache.over(memory, layout, torch.bfloat16)
    at = torch.arange(NUM_BLOCKS * BLOCK)
    for layer in range(LAYERS):
        key, value = (torch.randn(kv_heads, at.numel(), dim).bfloat16() for _ in range(2))
        cache.write(layer, TokenSlots(at // BLOCK, at % BLOCK), key, value)
    return cache


def alternating_medians_s(
    kernels: Sequence[Kernels], cache: KvCache, case: Case, heads: int, repeats: int
) -> list[float]:
    """Return the median seconds per call of each kernel library, measured in alternation."""
    free = iter(np.random.default_rng(0).permutation(NUM_BLOCKS))
    segments = [
        Segment(
            token_begin=number * case.num_tokens,
            num_tokens=case.num_tokens,
            kv_begin=case.context - case.num_tokens,
            block_ids=np.array([next(free) for _ in range(-(-case.context // BLOCK))], dtype=np.int64),
        )
        for number in range(case.num)
    ]
    step = AttentionStep(cache, segments, CausalMasks(cache.dtype, cache.device), paged_attention)
    _, head_dim = cache.uniform_shape
    query = torch.randn(heads, case.num * case.num_tokens, head_dim).bfloat16()
    took_s: list[list[float]] = [[] for _ in kernels]
    layers = cycle(range(LAYERS))  # a layer that was just read would still be in the CPU cache
    for _ in range(2 + repeats):
        for own, each in zip(took_s, kernels, strict=True):
            layer = next(layers)
            began_s = time.perf_counter()
            paged_kernel(each)(query, layer, step, head_dim**-0.5, None)
            own.append(time.perf_counter() - began_s)
    return [statistics.median(own[2:]) for own in took_s]


if __name__ == "__main__":
    main()
