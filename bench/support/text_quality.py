"""Measures the quality of a model on text: bits per byte, computed as a worker computes a prompt."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from baton.model.attention.attention_inputs import CausalMasks
from baton.model.backends.backend_selection import Backend
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel
from baton.model.step.step_inputs import PreparedSequence, pack
from tools.demo_model import corpus

WINDOW, CHUNK, BLOCK = 1024, 256, 16
"""Tokens of a window of text, of a step, and of a KV block."""

TextWindow = tuple[np.ndarray, int]
"""Token ids, and the bytes that the model predicts."""


def read_windows(model: Path, files: Sequence[Path] | None, max_tokens: int) -> list[TextWindow]:
    """Return windows of the texts in `files`, or of the modules that the demo model was not trained on.

    model: directory with the tokenizer. Raises ValueError if the texts have no token to predict.
    """
    texts = [file.read_text(encoding="utf-8") for file in files] if files else held_out_texts()
    windows = list(token_windows(Tokenizer.from_file(str(model / "tokenizer.json")), texts, max_tokens))
    if not windows:
        raise ValueError(f"{len(texts)} texts and at most {max_tokens} tokens: nothing to predict; give longer texts")
    return windows


def judged(change: float, allowed: float | None) -> str:
    """Return whether this share of more bits per byte is allowed; empty if no limit is given."""
    return "" if allowed is None else f"{'yes' if change <= allowed else 'no'} (at most {allowed:+.0%})"


def bits_per_byte(loaded: LoadedModel, backend: Backend, windows: Sequence[TextWindow]) -> float:
    """Return the mean bits that the model needs for a byte of the windows, which share nothing."""
    nats = sum(window_nats(loaded, backend, tokens) for tokens, _ in windows)
    return nats / math.log(2) / sum(size for _, size in windows)


def held_out_texts() -> list[str]:
    """Return the source of each held-out module."""
    return [document.text for document in corpus.held_out_documents()]


def token_windows(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> Iterator[TextWindow]:
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
    """Return the negative log likelihood of all tokens but the first. A window has at least two."""
    cache = KvCache.zeros(loaded.layout(BLOCK), -(-tokens.size // BLOCK), loaded.device, loaded.dtype)
    masks, nats = CausalMasks(cache.dtype, cache.device), 0.0
    for begin in range(0, tokens.size - 1, CHUNK):
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
