"""Identifies a model by content: configuration, weights and load dtype."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from baton.core.errors import ModelError
from baton.core.tokenizer_fingerprint import FINGERPRINT_BYTES
from baton.model.loading.gguf.gguf_parts import gguf_files
from baton.model.loading.weight_digests import weight_digests

_Fact = TypeVar("_Fact")
_MAX_HEADER_BYTES = 256 << 20
_DAMAGED = (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""Errors of reading a file with unexpected content. RecursionError: its JSON is nested too deeply."""
_IGNORED_CONFIG_KEYS = frozenset(
    "transformers_version _name_or_path architectures dtype torch_dtype use_cache id2label label2id".split()
)
"""Configuration keys that do not change a result. The dtype that matters is the one the weights are loaded
in."""


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files that transformers will load, in order. Raises ModelError if any is
    missing."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except FileNotFoundError as error:
        raise ModelError(
            f"{model_dir} has no {single.name} and no {index.name}. Other weight files (*.bin, *.pt) are pickles "
            "and are not loaded: convert them with save_pretrained of transformers. A GGUF file is given by its path, "
            "or as owner/name:Q4_K_M on the hub"
        ) from error
    except _DAMAGED as error:
        raise ModelError(f"{index} cannot be read ({error}); download or copy it again") from error
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise ModelError(f"{model_dir} lacks {', '.join(missing)}, which {index.name} names; download or copy it again")
    return [model_dir / name for name in names]


def tensor_sizes(model_dir: Path) -> dict[str, int]:
    """Return the number of weights of each tensor in a model's files, by name.

    Raises ModelError if a file is missing or unreadable.
    """
    return _of_tensors(model_dir, lambda entry: math.prod(entry["shape"]))


def tensor_dtypes(model_dir: Path) -> dict[str, str]:
    """Return the type of each tensor in a model's files, as safetensors calls it, by name.

    Raises ModelError if a file is missing or unreadable.
    """
    return _of_tensors(model_dir, lambda entry: str(entry["dtype"]))


def _of_tensors(model_dir: Path, fact: Callable[[dict[str, Any]], _Fact]) -> dict[str, _Fact]:
    found: dict[str, _Fact] = {}
    for path in weight_files(model_dir):
        with _reading(path) as file:
            found.update((name, fact(entry)) for name, entry in _entries(file).items())
    return found


def num_weights(model_dir: Path, is_used: Callable[[str], object] = bool) -> int:
    """Return the number of weights in a model's files, of those tensors whose names are used.

    Raises ModelError if a file is missing or unreadable.
    """
    return sum(size for name, size in tensor_sizes(model_dir).items() if is_used(name))


def model_fingerprint(
    model_dir: Path, config: dict[str, Any], dtype: str, say: Callable[[str], object] = lambda text: None
) -> str:
    """Return a hex digest of everything that determines this model's KV.

    It covers configuration, quantisation, dtype, and every byte of the files with weights. So the same
    tensors in other files, or with other metadata, are another model.

    dtype: of the weights, with the format into which they are quantised, such as `bfloat16 int4`.
    say: told if it takes long, see `weight_digests`.
    Raises ModelError if a file is missing or unreadable.
    """
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=b"baton-model")
    content = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}
    files = gguf_files(model_dir) or weight_files(model_dir)
    for part in (dtype, json.dumps(content, sort_keys=True, default=str), *weight_digests(files, say=say)):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except _DAMAGED as error:
        raise ModelError(f"{path} is not a readable safetensors file ({error}); download or copy it again") from error


def _entries(file: BinaryIO) -> dict[str, Any]:
    """Return the entries of the tensors of a safetensors file, by name.

    Format: 8 bytes little-endian header length, JSON header, data (the safetensors README).
    """
    header_len = int.from_bytes(file.read(8), "little")
    if header_len > _MAX_HEADER_BYTES:
        raise ValueError(f"its header says that it has {header_len} bytes")
    header = json.loads(file.read(header_len))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    data_bytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if os.fstat(file.fileno()).st_size < 8 + header_len + data_bytes:
        raise ValueError("it is cut short")
    return entries
