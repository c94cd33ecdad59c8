"""Measures what KV in int8 costs in quality: bits per byte of a model on held-out text, per KV dtype.

python -m bench kv_quality [--model demo] [--text FILE ...] [--max-tokens 40000] [--dtype auto] [--threads 2]

The text is cut into windows of 1,024 tokens that share nothing. Each window is computed as a worker computes
a prompt: in chunks, with the backend that a worker would choose, over paged KV. All dtypes see the same
windows. Without --text, the text is that of the modules of Python's standard library that were held out when
the demo model was trained; it depends on the version of Python.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from baton.model.attention.attention_inputs import CausalMasks
from baton.model.backends.backend_selection import Backend, choose_backend
from baton.model.device.kv_tensors import DTYPES, KvCache
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.model_source import resolve_model
from baton.model.step.step_inputs import PreparedSequence, pack
from bench.systems.baton_cluster import machine, table
from tools.demo_model import corpus

WINDOW, CHUNK, BLOCK = 1024, 256, 16
KV_DTYPES = ("auto", "int8")


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
    texts = [file.read_text() for file in arguments.text] if arguments.text else held_out_texts()
    windows = list(token_windows(Tokenizer.from_file(str(path / "tokenizer.json")), texts, arguments.max_tokens))
    num_bytes = sum(size for _, size in windows)
    print(f"{machine('torch')}\n{sum(tokens.size for tokens, _ in windows):,} tokens, {num_bytes:,} bytes\n")
    rows: list[list[str]] = []
    first = 0.0
    for kv_dtype in KV_DTYPES:
        loaded = load_model(path, dtype=arguments.dtype, kv_dtype=kv_dtype, device="cpu")
        backend = choose_backend(loaded, kernels="auto", num_threads=arguments.threads, block_size_tokens=BLOCK)
        nats = sum(window_nats(loaded, backend, tokens) for tokens, _ in windows)
        bits = nats / math.log(2) / num_bytes
        first = first or bits
        layout = loaded.layout(BLOCK)
        shown = [layout.kv_dtype, f"{layout.block_bytes / BLOCK:,.0f}", f"{bits:.4f}", f"{bits / first - 1:+.3%}"]
        rows.append([*shown, backend.name])
    print(table(["KV", "bytes per token", "bits per byte", "change", "backend"], rows))


def held_out_texts() -> list[str]:
    """Return the source of each held-out module."""
    return [document.text for document in corpus.held_out_documents()]


def token_windows(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (token ids, bytes that the model predicts) of windows of at most WINDOW tokens.

    The first token of a window is not predicted, so its bytes do not count.
    """
    left = max_tokens
    for text in texts:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        for begin in range(0, len(encoded.ids) - 1, WINDOW):
            end = min(begin + WINDOW, len(encoded.ids))
            if end - begin < 2:
                continue
            if left <= 0:
                return
            left -= end - begin
            predicted = text[encoded.offsets[begin][1] : encoded.offsets[end - 1][1]]
            yield np.array(encoded.ids[begin:end], dtype=np.int64), len(predicted.encode())


@torch.inference_mode()
def window_nats(loaded: LoadedModel, backend: Backend, tokens: np.ndarray) -> float:
    """Return the negative log likelihood of all tokens but the first."""
    cache = KvCache.zeros(loaded.layout(BLOCK), -(-tokens.size // BLOCK), loaded.device, loaded.dtype)
    masks, nats = CausalMasks(cache.dtype, cache.device), 0.0
    for begin in range(0, tokens.size, CHUNK):
        end = min(begin + CHUNK, tokens.size)
        part = PreparedSequence(
            seq_id=0,
            token_ids=tokens[begin:end],
            position_begin=begin,
            kv_begin=begin,
            block_ids=np.arange(-(-end // BLOCK)),
            sample=None,
        )
        step = pack([part], cache, masks, backend.kernel)
        targets = torch.from_numpy(tokens[begin + 1 : end + 1])
        rows = torch.arange(targets.numel())
        logits = backend.forward(replace(step, sample_rows=rows)).logits.float()
        nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return nats


if __name__ == "__main__":
    main()
