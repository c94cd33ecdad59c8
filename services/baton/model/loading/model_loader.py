"""Loads a transformers model with paged attention for serving. Raises ModelError if it cannot be served."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from baton.core.eos_token_ids import eos_token_ids
from baton.core.errors import ModelError
from baton.core.kv.kv_layout import KvLayout
from baton.core.tokenizer_fingerprint import tokenizer_fingerprint
from baton.model.attention.paged_attention import PAGED
from baton.model.device.device_info import free_bytes
from baton.model.device.kv_tensors import DTYPE_NAMES, DTYPES, uniform_layout
from baton.model.linear.packer import WeightPacker
from baton.model.linear.replace import unify_forms
from baton.model.loading.checkpoint_weights import LoadOptions, is_loaded_by_module, open_by_module
from baton.model.loading.gguf.gguf_parts import gguf_files
from baton.model.loading.image.image_cache import NO_CACHE, ModelSource, PackedModelCache, load_unshared
from baton.model.loading.model_fingerprint import model_fingerprint, num_weights, tensor_dtypes, tensor_sizes
from baton.model.loading.model_support import OVERFLOWS_FLOAT16, causal_lm_class, kv_heads
from baton.model.loading.quantised.stated_config import require_plain, stated_quantisation
from baton.model.loading.skeleton import build_skeleton
from baton.model.loading.text_part import KEY_MAPPING, has_own_head, own_name, text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model and the facts about it that a worker needs. `eos_token_ids` may be empty.

    kv_dtype: how KV is stored, see `kv_components`.
    weight_format: of the checkpoint, for people.
    packer: has packed the linear layers; None if they are as they were loaded.
    mapped_bytes: of a file with the weights that processes share. The system counts them as free memory.
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
    packer: WeightPacker | None = None
    mapped_bytes: int = 0

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
    packer_for: Callable[[torch.dtype], WeightPacker | None] = lambda _dtype: None,
    cache: PackedModelCache = NO_CACHE,
    fingerprint: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> LoadedModel:
    """Load the model in directory `path` (see `model_source.resolve_model`), without network access.

    dtype: `auto` uses the checkpoint's own, or bfloat16 if weights are quantised or float16 overflows.
    kv_dtype: see `kv_components`. device: `auto` uses CUDA if there is a GPU.
    weights: `int8` or `int4` quantises the weights of linear layers; `auto` keeps the checkpoint's format.
    max_model_len: at most the model's own; None uses that. free_bytes: that a device can still allocate.
    packer_for: makes what packs the linear layers of a model of this dtype on a CPU; without, they stay.
    cache: keeps packed models for the workers of a machine. fingerprint: of a model whose KV never leaves the
    process; None hashes the weights. say: told if that takes long.
    Raises ModelError if the model cannot be served or loaded, or if there is too little memory.
    """
    whole = _read_config(path)
    config = text_config(whole)
    is_text_part = config is not whole
    model_class = causal_lm_class(config, is_text_part=is_text_part, max_model_len=max_model_len)
    tokenizer, ends = tokenizer_fingerprint(path), eos_token_ids(path)
    load_dtype, target = _load_dtype((whole, config), dtype), _device(device)
    _configure(path, config, is_text_part=is_text_part)
    if fingerprint is None:
        fingerprint = model_fingerprint(path, whole.to_dict(), _weights_text(load_dtype, weights), say)
    packer = packer_for(load_dtype) if target.type == "cpu" else None
    options = LoadOptions(dtype=load_dtype, device=target, weights=weights, packer=packer, is_text_part=is_text_part)
    require_memory = partial(_require_memory, f"{path}'s weights in {DTYPE_NAMES[load_dtype]}", target, free_bytes)
    source = ModelSource(
        fingerprint=fingerprint,
        new_skeleton=partial(_new_skeleton, model_class, config, load_dtype),
        load=partial(_load_checkpoint, path, model_class, config, options, require_memory),
        require_memory=require_memory,
    )
    if packer is not None and (packer.native_is_faster or is_loaded_by_module(path, config, weights)):
        found = cache.load(source, packer)
    else:
        found = load_unshared(source, packer)
    return LoadedModel(
        path=path,
        model=found.model,
        weight_format=found.weight_format,
        mapped_bytes=found.mapped_bytes,
        model_fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer,
        max_model_len=_max_model_len(config, max_model_len),
        vocab_size=config.vocab_size,
        eos_token_ids=ends,
        kv_dtype=kv_dtype,
        packer=packer,
    )


def _configure(path: Path, config: PreTrainedConfig, *, is_text_part: bool) -> None:
    """Prepare transformers and a configuration for loading. Raises ModelError for weights of unknown form."""
    _require_description(path, config, is_text_part=is_text_part)
    if is_text_part:
        config.tie_word_embeddings = not has_own_head(tensor_sizes(path))
        set_verbosity_error()  # else each weight of the other parts is reported as unexpected
    config._attn_implementation = PAGED
    disable_progress_bar()  # a worker's standard error is its log


def _require_description(path: Path, config: PreTrainedConfig, *, is_text_part: bool) -> None:
    """Raise ModelError if the weights are quantised, and nothing says how."""
    if getattr(config, "quantization_config", None) is None and not gguf_files(path):
        is_own = own_name if is_text_part else bool
        require_plain(path, {name: dtype for name, dtype in tensor_dtypes(path).items() if is_own(name)})


def _load_checkpoint(
    path: Path,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    options: LoadOptions,
    require_memory: Callable[[int, int], None],
) -> tuple[PreTrainedModel, str]:
    """Return a model with the weights of its checkpoint, and their format.

    require_memory: takes the bytes on the device, and on the host of a GPU.
    """
    is_text_part = options.is_text_part
    if is_loaded_by_module(path, config, options.weights):
        with open_by_module(path, model_class, config, options) as pending:
            require_memory(pending.num_bytes(), pending.host_bytes())
            model, weight_format = pending.load()
    else:
        size = num_weights(path, own_name if is_text_part else bool) * options.dtype.itemsize
        require_memory(size, size)
        model = _load_plain(path, model_class, config, options.dtype, KEY_MAPPING if is_text_part else None)
        unify_forms(model)
        weight_format = "plain"
    return cast(Any, model).to(options.device).eval().requires_grad_(False), weight_format


def _new_skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model without weights, whose layers have the forms of a loaded one."""
    model = build_skeleton(model_class, deepcopy(config), dtype)
    unify_forms(model)
    return model


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
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be loaded as {model_class.__name__}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would initialise them randomly
        raise ModelError(
            f"{path} is incomplete: it lacks {len(missing)} weights of {model_class.__name__}, "
            f"the first is {missing[0]}"
        )
    return cast(PreTrainedModel, model)


def _require_memory(
    what: str, target: torch.device, free_bytes: Callable[[torch.device], int], size: int, host_size: int = 0
) -> None:
    """Raise ModelError if `size` bytes are not free on the target, or `host_size` on the host of a GPU."""
    require_free_memory(size, free_bytes(target), what, str(target))
    if target.type != "cpu":
        host = torch.device("cpu")
        require_free_memory(host_size, free_bytes(host), what, f"this host, through which they go to {target}")


def require_free_memory(needed: int, free: int, what: str, where: str) -> None:
    """Raise ModelError, with the numbers, if `needed` bytes are more than `free`."""
    if needed > free:
        raise ModelError(
            f"{what} take {needed >> 20} MiB, and {free >> 20} MiB are free on {where}: "
            "give a smaller model, a --dtype of fewer bytes, or more memory"
        )


def _read_config(path: Path) -> PreTrainedConfig:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: give --model a Hugging Face model directory, a hub id, or demo")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # configuration classes check values in ways of their own
        raise ModelError(
            f"{path / 'config.json'} describes a model that this version of transformers does not support "
            f"({type(error).__name__}: {error})"
        ) from error
    if getattr(config, "quantization_config", None) is None and (found := stated_quantisation(path, config)):
        config.quantization_config = found
    return config


def _load_dtype(configs: tuple[PreTrainedConfig, PreTrainedConfig], dtype: str) -> torch.dtype:
    """Return the dtype to load. `configs`: of the whole model, then of its text part.

    Raises ModelError for float16 if the model overflows in it; `auto` then loads bfloat16.
    """
    overflows = configs[1].model_type in OVERFLOWS_FLOAT16
    if dtype != "auto":
        if overflows and DTYPES[dtype] is torch.float16:
            raise ModelError(
                f"{configs[1].model_type} exceeds the range of float16; use --dtype bfloat16 or --dtype float32"
            )
        return DTYPES[dtype]
    for config in configs:
        own = getattr(config, "dtype", None)
        own = getattr(torch, own, None) if isinstance(own, str) else own
        if own in DTYPE_NAMES:
            return torch.bfloat16 if overflows and own is torch.float16 else own
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


def text_config_and_dtype(path: Path, dtype: str) -> tuple[PreTrainedConfig, torch.dtype]:
    """Return the configuration of the text part of the model in `path`, and the dtype in which it is loaded.

    `dtype`: as in `load_model`. Raises ModelError if there is no configuration that can be read.
    """
    whole = _read_config(path)
    config = text_config(whole)
    return config, _load_dtype((whole, config), dtype)
