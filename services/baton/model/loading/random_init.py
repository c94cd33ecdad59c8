"""Writes a model with random weights. Each tensor is seeded by its name, and one shard is in memory at a
time."""

import json
import shutil
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from baton.core.eos_token_ids import eos_token_ids
from baton.core.errors import ModelError
from baton.model.loading.model_shapes import shape_config
from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.model_support import causal_lm_class
from baton.model.loading.skeleton import new_model

SHARD_BYTES = 2 << 30
ROUTER_LOGIT_STD = 2.0
"""Standard deviation of MoE router logits. If they were all alike, rounding would choose the experts."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

WriteProgress = Callable[[int, int], None]
"""Called with (bytes written, total bytes)."""


def init_like(shape: str, out: Path, *, seed: int = 0, progress: WriteProgress | None = None) -> None:
    """Write bfloat16 random weights of a named shape, with the demo's tokenizer.

    This is `baton model init --like SHAPE --out DIR`. Raises ModelError if the shape is unknown or `out` is
    not empty.
    """
    config = shape_config(shape)
    config.dtype = torch.bfloat16
    init_model(config, out, seed=seed, progress=progress)


def init_model(
    config: PreTrainedConfig,
    out: Path,
    *,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: WriteProgress | None = None,
) -> None:
    """Write random weights of `config` in its dtype (float32 if it has none), with the demo's tokenizer.

    The same seed writes the same files. Raises ModelError if `out` is not empty or the configuration cannot
    be served, OSError if a file cannot be written.
    """
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} is not empty: give --out a new directory")
    model_class = causal_lm_class(config, max_model_len=1)  # which contexts are served is decided at loading
    ends = list(eos_token_ids(DEMO_DIR))
    config.architectures = [model_class.__name__]
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, ends[0], None
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    model = new_model(model_class, config)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        shutil.copyfile(DEMO_DIR / name, out / name)
    shards = list(_shards(shapes, dtype.itemsize, shard_bytes))
    total = sum(_num_elements(shape) for shape in shapes.values()) * dtype.itemsize
    weight_map, written = {}, 0
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(
            {name: _random_tensor(name, shapes[name], dtype, config, seed) for name in names},
            out / file,
            metadata={"format": "pt"},
        )
        (out / file).chmod(0o644)  # safetensors creates files that only their owner can read
        weight_map.update(dict.fromkeys(names, file))
        written += sum(_num_elements(shapes[name]) for name in names) * dtype.itemsize
        if progress is not None:
            progress(written, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _num_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _shards(shapes: dict[str, tuple[int, ...]], itemsize: int, shard_bytes: int) -> Iterator[list[str]]:
    """Yield lists of tensor names, in order, whose tensors fit into one shard.

    A tensor larger than a shard gets its own.
    """
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = _num_elements(shape) * itemsize
        if names and size + num_bytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    if names:
        yield names


def _random_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, config: PreTrainedConfig, seed: int
) -> torch.Tensor:
    """Return ones for norms, zeros for biases, and random normal values for all other tensors."""
    if len(shape) == 1:
        return torch.zeros(shape, dtype=dtype) if name.endswith("bias") else torch.ones(shape, dtype=dtype)
    tensor_seed = int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator().manual_seed(tensor_seed)
    is_router = name.endswith(("mlp.gate.weight", "router.weight"))
    std = ROUTER_LOGIT_STD * shape[-1] ** -0.5 if is_router else getattr(config, "initializer_range", 0.02)
    return torch.empty(shape, dtype=dtype).normal_(std=std, generator=generator)
