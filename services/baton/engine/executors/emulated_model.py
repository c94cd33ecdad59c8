"""The model of an emulated worker: only its configuration and tokenizer are read. Weights are not needed."""

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from baton.core.eos_token_ids import eos_token_ids
from baton.core.errors import ModelError
from baton.core.kv.kv_layout import FLOAT_DTYPES, KvLayout, kv_components, kv_fingerprint, layer_groups
from baton.core.tokenizer_fingerprint import EMULATED, FINGERPRINT_BYTES, tokenizer_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedModel:
    """The shape of a model whose steps are emulated.

    Its `model_fingerprint` never equals that of a real model.
    has_window: its configuration names a sliding window. Real workers may then need less KV memory.
    """

    model_fingerprint: str
    tokenizer_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    kv_dtype: str = "auto"
    has_window: bool = False

    def layout(self, block_size_tokens: int) -> KvLayout:
        """Return a KV layout of the size of the real model's, so that transfers move as many bytes."""
        components = kv_components(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=self.dtype, kv_dtype=self.kv_dtype
        )
        return KvLayout(
            model_fingerprint=kv_fingerprint(self.model_fingerprint, self.kv_dtype),
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            block_size_tokens=block_size_tokens,
            groups=layer_groups([(components, 0)] * self.num_layers),
        )


def read_emulated_model(
    path: Path, *, dtype: str = "auto", kv_dtype: str = "auto", max_model_len: int | None = None
) -> EmulatedModel:
    """Read the model in directory `path` from its config.json.

    Only values that are in the file are used; defaults of transformers are not known here. Raises ModelError
    if the file is unreadable, lacks a value, or if `max_model_len` is more than the model supports.
    """
    config = _read_config(path)
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")
    missing = [name for name in names if not isinstance(config.get(name), int) or config[name] < 1]
    if missing:
        raise ModelError(
            f"{path / 'config.json'} has no positive integer {', '.join(missing)}; "
            "--device emulated needs it to size the KV"
        )
    own_len: int = config["max_position_embeddings"]
    if max_model_len is not None and max_model_len > own_len:
        raise ModelError(
            f"--max-model-len is {max_model_len}; must be at most {own_len} (max_position_embeddings of the model)"
        )
    if dtype == "auto":
        dtype = config["dtype"] or ("float32" if config.get("quantization_config") is None else "bfloat16")
    return EmulatedModel(
        model_fingerprint=_fingerprint(config, dtype),
        tokenizer_fingerprint=tokenizer_fingerprint(path),
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        dtype=dtype,
        vocab_size=config["vocab_size"],
        max_model_len=max_model_len or own_len,
        eos_token_ids=eos_token_ids(path),
        kv_dtype=kv_dtype,
        has_window=config.get("sliding_window") is not None,
    )


def _read_config(path: Path) -> dict[str, Any]:
    """Return the configuration of the text part. Its `dtype` is one of `FLOAT_DTYPES`, or None."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} has no readable config.json ({error}): give --model a model directory, a hub id, or demo"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path / 'config.json'} is not a JSON object; give --model a model directory")
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise ModelError(f"text_config in {path / 'config.json'} is not a JSON object; give --model a model directory")
    # Of a composite model, only the text part is served. As for a real one, the dtype of the whole counts first.
    named = (part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype"))
    return {**config, **text, "dtype": next((name for name in named if name in FLOAT_DTYPES), None)}


def _fingerprint(config: dict[str, Any], dtype: str) -> str:
    content = json.dumps([dtype, config], sort_keys=True).encode()
    return EMULATED + blake2b(content, digest_size=FINGERPRINT_BYTES, person=b"baton-emulated").hexdigest()
