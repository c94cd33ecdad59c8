"""Measures what KV in int8 costs and saves: bits per byte of held-out text, and bytes, per KV dtype.

python -m bench kv_quality [--model demo] [--text FILE ...] [--max-tokens 40000] [--dtype auto] [--threads 2]

The text is cut into windows of 1,024 tokens that share nothing. Each window is computed as a worker computes
a prompt: in chunks, with the backend that a worker would choose, over paged KV. All dtypes see the same
windows. Without --text, the text is that of the modules of Python's standard library that were held out when
the demo model was trained; it depends on the version of Python.

The bytes per token are those of a token in a block: what it takes in memory, and what a transfer of it moves,
because a transfer copies blocks as they are. int8 may cost 1 % more bits per byte.
"""

import argparse
from pathlib import Path

import torch

from baton.model.backends.backend_selection import choose_backend
from baton.model.device.kv_tensors import DTYPES
from baton.model.loading.model_loader import load_model
from baton.model.loading.model_source import resolve_model
from bench.support.text_quality import BLOCK, bits_per_byte, judged, read_windows
from bench.systems.baton_cluster import machine, table

KV_DTYPES = ("auto", "int8")
ALLOWED = {"int8": 0.01}
"""Share of more bits per byte that a KV dtype may cost."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="model directory, hub id, or demo (demo)")
    parser.add_argument("--text", type=Path, nargs="+", help="UTF-8 files to use instead of the held-out modules")
    parser.add_argument("--max-tokens", type=int, default=40_000, help="tokens to measure (40000)")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="of the weights (auto)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (2)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = resolve_model(arguments.model)
    windows = read_windows(path, arguments.text, arguments.max_tokens)
    num_tokens, num_bytes = sum(tokens.size for tokens, _ in windows), sum(size for _, size in windows)
    print(f"{machine('torch')}\n{num_tokens:,} tokens, {num_bytes:,} bytes\n")
    rows: list[list[str]] = []
    first, first_bytes = 0.0, 0
    for kv_dtype in KV_DTYPES:
        loaded = load_model(path, dtype=arguments.dtype, kv_dtype=kv_dtype, device="cpu")
        backend = choose_backend(loaded, kernels="auto", num_threads=arguments.threads, block_size_tokens=BLOCK)
        bits = bits_per_byte(loaded, backend, windows)
        layout = loaded.layout(BLOCK)
        first, first_bytes = first or bits, first_bytes or layout.block_bytes
        change = bits / first - 1
        of_first = [f"{layout.block_bytes / first_bytes:.1%}", f"{bits:.4f}", f"{change:+.3%}"]
        rows.append(
            [
                layout.kv_dtype,
                f"{layout.block_bytes / BLOCK:,.0f}",
                *of_first,
                judged(change, ALLOWED.get(kv_dtype)),
                backend.name,
            ]
        )
    print(table(["KV", "bytes per token", "of the first", "bits per byte", "change", "allowed", "backend"], rows))


if __name__ == "__main__":
    main()
