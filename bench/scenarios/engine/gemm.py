"""Our matrix products beside torch's, and drawing on the host beside drawing all rows at once: what
`native/gemm.h` and `host_sampler.py` are there for.

python -m bench gemm [--threads 2] [--repeats 15]

All of each kind in turns, medians. Torch's in bfloat16 are oneDNN's over packed weights where the processor
has them (`fused.py`); in float32 they are what bfloat16 is held against where it is emulated.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import nn

from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.engine.state.step import SampleRequest
from baton.model.backends.fused_layers import PackedLinear
from baton.model.backends.native_decoder import PackedGemm
from baton.model.device.compute_thread import compute_thread
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.sampling import device_sampler, host_sampler
from bench.systems.baton_cluster import machine, table

SHAPES = ((256, 512), (512, 3072), (1024, 6144), (3072, 1024))
ROWS = (1, 8, 32, 512)
CALLS_S = 0.02
"""Of each at a time, at least one call."""
VOCABULARIES = (4096, 151_936)
NUM_SEQS = 32
KINDS = {"temperature 1": {}, "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95}, "top-p 0.9": {"top_p": 0.9}}


def in_turns(calls: tuple[Callable[[], object], ...], repeats: int) -> list[float]:
    """Median seconds of each."""
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
    kernels = load_kernels(num_threads)
    rows = []
    for k, n in SHAPES:
        module = nn.Linear(k, n, bias=False).bfloat16().requires_grad_(False)
        ours, theirs, in_floats = PackedGemm(kernels, module), PackedLinear(module), deepcopy(module).float()
        for num_rows in ROWS:
            x = torch.randn(num_rows, k).bfloat16()
            ours_s, theirs_s, floats_s = in_turns(
                (partial(ours, x), partial(theirs, x), partial(in_floats, x.float())), repeats
            )
            rate = 2 * num_rows * k * n / ours_s / 1e9
            rows.append(
                [
                    f"{k} x {n}",
                    f"{num_rows}",
                    f"{ours_s * 1e6:.1f} us",
                    f"{theirs_s * 1e6:.1f} us",
                    f"{floats_s * 1e6:.1f} us",
                    f"{theirs_s / ours_s:.2f}",
                    f"{rate:.0f}",
                ]
            )
    return rows


def drawn_on_host(logits: torch.Tensor, requests: list[SampleRequest]) -> list[tuple[int, ...] | None]:
    return list(map(host_sampler.draw, logits.numpy(), requests))


def sampler_rows(repeats: int) -> list[list[str]]:
    rows = []
    for vocab_size in VOCABULARIES:
        logits = 3 * torch.randn(NUM_SEQS, vocab_size)
        for name, asked in KINDS.items():
            requests = [
                SampleRequest(
                    sampling=Sampling(max_tokens=1, seed=seed, **asked),  # type: ignore[arg-type]
                    sample_indices=(0,),
                    position=9,
                    history=token_ids(range(9)),
                    num_prompt_tokens=9,
                )
                for seed in range(NUM_SEQS)
            ]
            host_s, device_s = in_turns(
                (partial(drawn_on_host, logits, requests), partial(device_sampler.draw, logits, requests)),
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


@torch.inference_mode()
def bench(arguments: argparse.Namespace) -> None:
    print(machine("torch"))
    products = ["inputs x outputs", "rows", "ours", "torch's", "in float32", "times as fast", "GFLOP/s"]
    samplers = ["vocabulary", f"{NUM_SEQS} rows", "numpy, row by row", "torch, at once", "torch over numpy"]
    print("\n" + table(products, product_rows(arguments.threads, arguments.repeats)))
    print("\n" + table(samplers, sampler_rows(arguments.repeats)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    with compute_thread(arguments.threads) as thread:  # one team of threads, as in a worker
        thread.submit(bench, arguments).result()


if __name__ == "__main__":
    main()
