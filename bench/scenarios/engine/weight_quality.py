"""Measures what quantised weights cost in quality: bits per byte of held-out text, per weight format.

python -m bench weight_quality [--model demo] [--formats auto,int8,int4] [--gguf FILE ...] [--text FILE ...]
[--max-tokens 40000] [--threads 2]

The text and its windows are those of `kv_quality`. `auto` is the checkpoint as it is, and the row that others
are compared with; int8 and int4 quantise it at load (`--weights`). `--gguf` adds files of the same model with
the same tokenizer, such as a Q4_K_M. int8 may cost 1 % more bits per byte, and int4 5 %.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from baton.model.backends.backend_selection import choose_backend
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.model_source import resolve_model
from bench.support.text_quality import BLOCK, bits_per_byte, judged, read_windows
from bench.systems.baton_cluster import machine, table

FORMATS = "auto,int8,int4"
ALLOWED = {"int8": 0.01, "int4": 0.05}
"""Share of more bits per byte that a format may cost."""


def loaded_models(path: Path, formats: list[str], files: list[Path]) -> Iterator[tuple[str, LoadedModel]]:
    """Yield the model with weights of each format, then the files. KV and activations are bfloat16."""
    for name in formats:
        yield name, load_model(path, dtype="bfloat16", device="cpu", weights=name)
    for file in files:
        yield file.name, load_model(resolve_model(str(file)), dtype="bfloat16", device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="model directory, hub id, or demo (demo)")
    parser.add_argument("--formats", default=FORMATS, help=f"comma-separated ({FORMATS})")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="GGUF files of the same model")
    parser.add_argument("--text", type=Path, nargs="+", help="UTF-8 files to use instead of the held-out modules")
    parser.add_argument("--max-tokens", type=int, default=40_000, help="tokens to measure (40000)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (2)")
    arguments = parser.parse_args()
    formats = arguments.formats.split(",")
    if unknown := [name for name in formats if name not in FORMATS.split(",")]:
        parser.error(f"unknown format {unknown[0]!r}; choose from {FORMATS}")
    if missing := [file for file in arguments.gguf if not file.exists()]:
        parser.error(f"--gguf {missing[0]}: there is no such file")
    torch.set_num_threads(arguments.threads)
    path = resolve_model(arguments.model)
    windows = read_windows(path, arguments.text, arguments.max_tokens)
    num_tokens, num_bytes = sum(tokens.size for tokens, _ in windows), sum(size for _, size in windows)
    print(f"{machine('torch')}\n{num_tokens:,} tokens, {num_bytes:,} bytes\n")
    rows: list[list[str]] = []
    first = 0.0
    for name, loaded in loaded_models(path, formats, arguments.gguf):
        backend = choose_backend(loaded, kernels="auto", num_threads=arguments.threads, block_size_tokens=BLOCK)
        bits = bits_per_byte(loaded, backend, windows)
        first = first or bits
        change = bits / first - 1
        rows.append(
            [
                name,
                loaded.weight_format,
                f"{bits:.4f}",
                f"{change:+.3%}",
                judged(change, ALLOWED.get(name)),
                backend.name,
            ]
        )
    print(table(["weights", "checkpoint", "bits per byte", "change", "allowed", "backend"], rows))


if __name__ == "__main__":
    main()
