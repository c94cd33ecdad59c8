"""Measures Baton's CPU matrix products, host sampler and greedy tokens against torch's.

python -m bench gemm [--threads 2] [--repeats 15] [--formats]

All implementations run in alternation; figures are medians. In bfloat16, torch uses oneDNN with packed
weights if the processor supports it (`baton.model.backends.fused_layers`). The float32 column matters on
processors that emulate bfloat16. The host sampler draws row by row in numpy; the torch sampler draws all rows
in one call. Greedy tokens are the most likely ones of each row, without masks, and with masks that allow few
tokens or every other one. `--formats` measures products with weights of each format instead.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import numpy as np
import torch
from torch import nn

from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.engine.constraints.token_bits import Bits, bits_of, num_words
from baton.engine.state.step import SampleRequest
from baton.model.backends.fused_layers import PackedLinear
from baton.model.device.compute_thread import compute_thread
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.linear.packed_linear import PackedGemm
from baton.model.sampling import device_sampler, host_sampler
from baton.model.sampling.best_tokens import find_best
from bench.support import gemm_formats
from bench.systems.baton_cluster import machine, table

SHAPES = ((256, 512), (512, 3072), (1024, 6144), (3072, 1024))
ROWS = (1, 8, 32, 512)
CALLS_S = 0.02
"""Seconds per timed batch of calls. A batch has at least one call."""
VOCABULARIES = (4096, 32_000, 151_936)
NUM_SEQS = 32
KINDS = {"temperature 1": {}, "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95}, "top-p 0.9": {"top_p": 0.9}}


def alternating_medians_s(calls: tuple[Callable[[], object], ...], repeats: int) -> list[float]:
    """Return the median seconds per call of each function, measured in alternation."""
    taken: list[list[float]] = [[] for _ in calls]
    counts = []
    for call in calls:
        call()
        began_s = time.perf_counter()
        call()
        counts.append(max(1, int(CALLS_S / (time.perf_counter() - began_s))))
    for _ in range(repeats):
        for call, count, found in zip(calls, counts, taken, strict=True):
            began_s = time.perf_counter()
            for _ in range(count):
                call()
            found.append((time.perf_counter() - began_s) / count)
    return [statistics.median(found) for found in taken]


def product_rows(num_threads: int, repeats: int) -> list[list[str]]:
    """Return the table rows for matrix products, one per shape and row count."""
    kernels = load_kernels(num_threads)
    rows = []
    for k, n in SHAPES:
        module = nn.Linear(k, n, bias=False).bfloat16().requires_grad_(False)
        own, onednn, float32 = PackedGemm(kernels, module), PackedLinear(module), deepcopy(module).float()
        for num_rows in ROWS:
            x = torch.randn(num_rows, k).bfloat16()
            own_s, onednn_s, float32_s = alternating_medians_s(
                (partial(own, x), partial(onednn, x), partial(float32, x.float())), repeats
            )
            rate = 2 * num_rows * k * n / own_s / 1e9
            rows.append(
                [
                    f"{k} x {n}",
                    f"{num_rows}",
                    f"{own_s * 1e6:.1f} us",
                    f"{onednn_s * 1e6:.1f} us",
                    f"{float32_s * 1e6:.1f} us",
                    f"{onednn_s / own_s:.2f}",
                    f"{rate:.0f}",
                ]
            )
    return rows


def sample_on_host(logits: torch.Tensor, requests: list[SampleRequest]) -> list[tuple[int, ...] | None]:
    """Sample each row of `logits` with the host sampler."""
    return list(map(host_sampler.draw, logits.numpy(), requests))


def sampler_rows(repeats: int) -> list[list[str]]:
    """Return the table rows for sampling, one per vocabulary size and sampling setting."""
    rows = []
    for vocab_size in VOCABULARIES:
        logits = 3 * torch.randn(NUM_SEQS, vocab_size)
        for name, fields in KINDS.items():
            requests = [
                SampleRequest(
                    sampling=Sampling(max_tokens=1, seed=seed, **fields),  # type: ignore[arg-type]
                    sample_indices=(0,),
                    position=9,
                    history=token_ids(range(9)),
                    num_prompt_tokens=9,
                )
                for seed in range(NUM_SEQS)
            ]
            host_s, device_s = alternating_medians_s(
                (partial(sample_on_host, logits, requests), partial(device_sampler.draw, logits, requests)),
                repeats,
            )
            rows.append(
                [
                    f"{vocab_size}",
                    name,
                    f"{host_s * 1e3:.1f} ms",
                    f"{device_s * 1e3:.1f} ms",
                    f"{device_s / host_s:.1f}",
                ]
            )
    return rows


def masks_of(vocab_size: int) -> dict[str, Bits]:
    """Return masks for `NUM_SEQS` rows, or for none, by name."""
    few, half = bits_of(range(160, 163), vocab_size), bits_of(range(0, vocab_size, 2), vocab_size)
    none = np.zeros((0, num_words(vocab_size)), dtype=np.uint32)
    return {"no masks": none, "3 tokens allowed": np.tile(few, (NUM_SEQS, 1)), "half": np.tile(half, (NUM_SEQS, 1))}


def greedy_rows(num_threads: int, repeats: int) -> list[list[str]]:
    """Return the table rows for greedy tokens, one per vocabulary size and kind of masks."""
    kernels = load_kernels(num_threads)
    rows = []
    for vocab_size in VOCABULARIES:
        logits = torch.randn(NUM_SEQS, vocab_size)
        for name, bits in masks_of(vocab_size).items():
            arguments = (logits, np.arange(len(bits)), bits)
            own_s, torch_s = alternating_medians_s(
                (partial(kernels.find_best, *arguments), partial(find_best, *arguments)), repeats
            )
            rows.append(
                [f"{vocab_size}", name, f"{own_s * 1e6:.0f} us", f"{torch_s * 1e6:.0f} us", f"{torch_s / own_s:.1f}"]
            )
    return rows


@torch.inference_mode()
def bench(arguments: argparse.Namespace) -> None:
    """Print all tables."""
    print(machine("torch"))
    if arguments.formats:
        found = gemm_formats.format_rows(arguments.threads, arguments.repeats, alternating_medians_s)
        print("\n" + table(gemm_formats.HEADER, found))
        return
    products = [
        "inputs x outputs",
        "rows",
        "Baton",
        "torch bfloat16",
        "torch float32",
        "times as fast as bfloat16",
        "GFLOP/s",
    ]
    samplers = ["vocabulary", f"{NUM_SEQS} rows", "numpy, row by row", "torch, all rows", "torch over numpy"]
    print("\n" + table(products, product_rows(arguments.threads, arguments.repeats)))
    greedy = ["vocabulary", f"greedy, {NUM_SEQS} rows", "C++ kernel", "torch and numpy", "torch over kernel"]
    print("\n" + table(samplers, sampler_rows(arguments.repeats)))
    print("\n" + table(greedy, greedy_rows(arguments.threads, arguments.repeats)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="compute threads (2)")
    parser.add_argument("--repeats", type=int, default=15, help="timed batches of calls per cell (15)")
    parser.add_argument("--formats", action="store_true", help="products with weights of each format")
    arguments = parser.parse_args()
    with compute_thread(arguments.threads) as thread:  # one thread pool for all kernels, as in a worker
        thread.submit(bench, arguments).result()


if __name__ == "__main__":
    main()
