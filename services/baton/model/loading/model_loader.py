"""Loads a transformers model with paged attention for serving. Raises ModelError if it cannot be served."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from baton.core.errors import ModelError
from baton.core.kv.kv_layout import KvLayout
from baton.core.tokenizer_fingerprint import tokenizer_fingerprint
from baton.model.attention.paged_attention import PAGED
from baton.model.device.device_info import free_bytes
from baton.model.device.kv_tensors import DTYPE_NAMES, DTYPES, uniform_layout
from baton.model.loading.checkpoint_weights import LoadOptions, is_loaded_by_module, open_by_module
from baton.model.loading.model_fingerprint import model_fingerprint, num_weights, tensor_sizes
from baton.model.loading.model_support import causal_lm_class, kv_heads
from baton.model.loading.text_part import KEY_MAPPING, has_own_head, own_name, text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model and the facts about it that a worker needs. `eos_token_ids` may be empty.

    kv_dtype: how KV is stored, see `kv_components`.
    weight_format: of the checkpoint, for people.
    """

    path: Path
    model: PreTrainedModel
    weight_format: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_dtype: str = "auto"

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def layout(self, block_size_tokens: int, windows: tuple[int | None, ...] = ()) -> KvLayout:
        """Return how this model's KV is laid out in memory, for blocks of `block_size_tokens` tokens.

        `windows`: of each layer, as `verify_masks` has found them; empty if no KV is to be freed while a
        sequence runs.
        """
        num_kv_heads, head_dim = kv_heads(self.config)
        return uniform_layout(
            model_fingerprint=self.model_fingerprint,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            block_size_tokens=block_size_tokens,
            num_layers=self.config.num_hidden_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            windows=windows,
        )


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    device: str = "auto",
    weights: str = "auto",
    max_model_len: int | None = None,
    free_bytes: Callable[[torch.device], int] = free_bytes,
) -> LoadedModel:
    """Load the model in directory `path` (see `model_source.resolve_model`), without network access.

    dtype: `auto` uses the checkpoint's own, or bfloat16 if its weights are quantised.
    kv_dtype: see `kv_components`.
    device: `auto` uses CUDA if there is a GPU.
    weights: `int8` or `int4` quantises the weights of linear layers; `auto` keeps the checkpoint's format.
    max_model_len: at most the model's own; None uses that.
    free_bytes: bytes that can still be allocated on a device.
    Raises ModelError if the model cannot be served or loaded, or if there is too little memory.
    """
    whole = _read_config(path)
    config = text_config(whole)
    is_text_part = config is not whole
    model_class = causal_lm_class(config, is_text_part=is_text_part, max_model_len=max_model_len)
    tokenizer = tokenizer_fingerprint(path)
    load_dtype = _load_dtype((whole, config), dtype)
    target = _device(device)
    if is_text_part:
        config.tie_word_embeddings = not has_own_head(tensor_sizes(path))
        set_verbosity_error()  # else each weight of the other parts is reported as unexpected
    what = f"{path}'s weights in {DTYPE_NAMES[load_dtype]}"
    config._attn_implementation = PAGED
    disable_progress_bar()  # a worker's standard error is its log
    fingerprint = model_fingerprint(path, whole.to_dict(), _weights_text(load_dtype, weights))
    if is_loaded_by_module(path, config, weights):
        options = LoadOptions(dtype=load_dtype, device=target, weights=weights, is_text_part=is_text_part)
        with open_by_module(path, model_class, config, options) as pending:
            _require_memory(pending.num_bytes(), what, target, free_bytes)
            model, weight_format = pending.load()
    else:
        size = num_weights(path, own_name if is_text_part else bool) * load_dtype.itemsize
        _require_memory(size, what, target, free_bytes)
        model = _load_plain(path, model_class, config, load_dtype, KEY_MAPPING if is_text_part else None)
        weight_format = "plain"
    model = cast(Any, model).to(target).eval().requires_grad_(False)
    return LoadedModel(
        path=path,
        model=model,
        weight_format=weight_format,
        model_fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer,
        max_model_len=_max_model_len(config, max_model_len),
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids(path),
        kv_dtype=kv_dtype,
    )


def _weights_text(dtype: torch.dtype, weights: str) -> str:
    return DTYPE_NAMES[dtype] if weights == "auto" else f"{DTYPE_NAMES[dtype]} {weights}"


def _load_plain(
    path: Path,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    key_mapping: dict[str, str] | None,
) -> PreTrainedModel:
    """Load plain weights in the way of transformers. Raises ModelError if any is missing.

    `key_mapping`: replacements by pattern for the names of weights.
    """
    try:
        model, info = cast(Any, model_class).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=PAGED,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            key_mapping=key_mapping,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(f"{path} cannot be loaded as {model_class.__name__}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would initialise them randomly
        raise ModelError(
            f"{path} is incomplete: it lacks {len(missing)} weights of {model_class.__name__}, "
            f"the first is {missing[0]}"
        )
    return cast(PreTrainedModel, model)


def _require_memory(size: int, what: str, target: torch.device, free_bytes: Callable[[torch.device], int]) -> None:
    require_free_memory(size, free_bytes(target), what, str(target))
    if target.type != "cpu":
        host = torch.device("cpu")
        require_free_memory(size, free_bytes(host), what, f"this host, through which they go to {target}")


def require_free_memory(needed: int, free: int, what: str, where: str) -> None:
    """Raise ModelError, with the numbers, if `needed` bytes are more than `free`."""
    if needed > free:
        raise ModelError(
            f"{what} take {needed >> 20} MiB, and {free >> 20} MiB are free on {where}: "
            "give a smaller model, a --dtype of fewer bytes, or more memory"
        )


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """Return the token ids that end a text, from generation_config.json, else from config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            content = json.loads((path / name).read_text())
            value = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ModelError(f"{path / name} cannot be read: {error}") from error
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def _read_config(path: Path) -> PreTrainedConfig:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: give --model a Hugging Face model directory, a hub id, or demo")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{path / 'config.json'} describes a model that this version of transformers does not support: {error}"
        ) from error
    return config


def _load_dtype(configs: tuple[PreTrainedConfig, PreTrainedConfig], dtype: str) -> torch.dtype:
    """Return the dtype to load. `configs`: of the whole model, then of its text part."""
    if dtype != "auto":
        return DTYPES[dtype]
    for config in configs:
        own = getattr(config, "dtype", None)
        own = getattr(torch, own, None) if isinstance(own, str) else own
        if own in DTYPE_NAMES:
            return own
    return torch.float32 if getattr(configs[1], "quantization_config", None) is None else torch.bfloat16


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "--device cuda: this PyTorch sees no CUDA device; use --device cpu, or install a CUDA build of PyTorch"
        )
    return torch.device(device)


def _max_model_len(config: PreTrainedConfig, requested: int | None) -> int:
    own: int = config.max_position_embeddings
    if requested is not None and requested > own:
        raise ModelError(
            f"--max-model-len {requested} is more than the model's own {own} positions (max_position_embeddings)"
        )
    return own if requested is None else requested
