"""How fast is paged attention, beside what the cores allow? And beside that of another tree, in turns.

python -m bench attention [--repeats 15] [--against services/baton/engine/model/native of another checkout]

Of our kernels, in bfloat16 and with two threads: a chunk of a prompt behind a context, and sequences that
decode one token each, with the heads of two models. KV lies in huge pages and in blocks in any order, as a
worker's does; each call is of another of LAYERS layers. Shares are of the rates of products and of reading
memory that `roofline.py` measures: of prompts their operations, of decode the bytes of keys and values.
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
from baton.model.device.kv_tensors import KvCache, uniform_layout
from baton.model.kernels.cpu.kernel_build import OPTIONS, SOURCES, build, find_compiler
from baton.model.kernels.cpu.kernel_library import Kernels, paged_kernel
from baton.runtime.process.anonymous_memory import allocate_anonymous
from bench.support.roofline import measured
from bench.systems.baton_cluster import machine, table

THREADS = 2
LAYERS = 8
BLOCK = 16
NUM_BLOCKS = 1_400
HEADS = {"42M": (8, 4, 64), "0.6B": (16, 8, 128)}
"""(query heads, KV heads, head size)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`num` sequences of which the step has `num_tokens` each, the last of `context`."""

    num: int
    num_tokens: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.num} x 1 of {self.context}" if self.num_tokens == 1 else f"{self.num_tokens} of {self.context}"

    @property
    def num_pairs(self) -> float:
        """Of a query and a key that it sees."""
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
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    print(machine("torch"))
    limits = measured(THREADS)
    print(f"products {limits.flops / 1e9:,.0f} GFLOP/s, memory {limits.bytes / 1e9:.1f} GB/s\n")
    with libraries(arguments.against) as kernels:
        for name, (heads, kv_heads, dim) in HEADS.items():
            cache = cache_of(kv_heads, dim)
            rows = []
            for case in CASES:
                took_s = in_turns(kernels, cache, case, heads, arguments.repeats)
                is_decode = case.num_tokens == 1
                kv_bytes = 2 * 2 * kv_heads * dim * case.num * case.context
                limit_s = kv_bytes / limits.bytes if is_decode else 4 * heads * dim * case.num_pairs / limits.flops
                of_what = "memory" if is_decode else "products"
                shown = [f"{1e3 * each:.3f} ms, {limit_s / each:.0%} of {of_what}" for each in took_s]
                rows.append([case.name, *shown, *([f"{took_s[1] / took_s[0]:.2f}"] if len(took_s) > 1 else [])])
            head = [
                f"{name}: tokens of context",
                "ours",
                *(["the other's", "times as fast"] if len(kernels) > 1 else []),
            ]
            print(table(head, rows) + "\n")


@contextmanager
def libraries(against: Path | None) -> Iterator[list[Kernels]]:
    """Ours, and the other's under names of its own: what is inline is one for a whole process."""
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


def cache_of(kv_heads: int, dim: int) -> KvCache:
    """Full of random numbers."""
    layout = uniform_layout(
        model_fingerprint="bench",
        tokenizer_fingerprint="bench",
        block_size_tokens=BLOCK,
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.bfloat16,
    )
    cache = KvCache.over(memoryview(allocate_anonymous(NUM_BLOCKS * layout.block_bytes)), layout)
    for block in cache.blocks:
        block.normal_()
    return cache


def in_turns(kernels: Sequence[Kernels], cache: KvCache, case: Case, heads: int, repeats: int) -> list[float]:
    """Median seconds of each."""
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
    query = torch.randn(heads, case.num * case.num_tokens, cache.head_dim).bfloat16()
    took_s: list[list[float]] = [[] for _ in kernels]
    layers = cycle(range(LAYERS))  # never one that was just read: whoever came second would find it in a cache
    for _ in range(2 + repeats):
        for own, each in zip(took_s, kernels, strict=True):
            layer = next(layers)
            began_s = time.perf_counter()
            paged_kernel(each)(query, layer, step, cache.head_dim**-0.5, None)
            own.append(time.perf_counter() - began_s)
    return [statistics.median(own[2:]) for own in took_s]


if __name__ == "__main__":
    main()
