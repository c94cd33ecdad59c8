"""Identifies a model by content: configuration, weights and load dtype. Fast enough to run at every start."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from baton.core.errors import ModelError
from baton.core.tokenizer_fingerprint import FINGERPRINT_BYTES
from baton.model.loading.gguf.gguf_cache import GGUF_LINK
from baton.model.loading.gguf.gguf_file import GgufFile

_FULLY_HASHED_BYTES = 64 << 10
_SAMPLES = 4
_SAMPLE_BYTES = 8 << 10
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
            "and are not loaded: convert them with save_pretrained of transformers"
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
    sizes: dict[str, int] = {}
    for path in weight_files(model_dir):
        with _reading(path) as file:
            sizes.update((name, math.prod(entry["shape"])) for name, entry in _header(file)[0].items())
    return sizes


def num_weights(model_dir: Path, is_used: Callable[[str], object] = bool) -> int:
    """Return the number of weights in a model's files, of those tensors whose names are used.

    Raises ModelError if a file is missing or unreadable.
    """
    return sum(size for name, size in tensor_sizes(model_dir).items() if is_used(name))


def gguf_file(model_dir: Path) -> Path | None:
    """Return the GGUF file that holds the weights of a model directory; None if it has safetensors."""
    path = model_dir / GGUF_LINK
    return path.resolve() if path.is_file() else None


def weight_version(model_dir: Path) -> str:
    """Return a text that changes when a file with weights is replaced: sizes and times.

    Raises ModelError if a file is missing.
    """
    gguf = gguf_file(model_dir)
    try:
        facts = [path.stat() for path in ([gguf] if gguf is not None else weight_files(model_dir))]
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read ({error}); download or copy it again") from error
    return " ".join(f"{each.st_size}@{each.st_mtime_ns}" for each in facts)


def model_fingerprint(model_dir: Path, config: dict[str, Any], dtype: str) -> str:
    """Return a hex digest of everything that determines this model's KV.

    It covers configuration, quantisation, dtype, and each tensor's name, shape, dtype and bytes. Tensors up
    to 64 KiB are hashed completely; of larger ones four samples of 8 KiB are hashed, spread over the tensor.
    So two models of one shape differ even after little training.

    dtype: of the weights, with the format into which they are quantised, such as `bfloat16 int4`.
    Raises ModelError if a file is missing or unreadable.
    """
    digest = blake2b(digest_size=FINGERPRINT_BYTES, person=b"baton-model")
    content = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}
    for part in (dtype, json.dumps(content, sort_keys=True, default=str)):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    if (gguf := gguf_file(model_dir)) is not None:
        _update_with_gguf(digest, gguf)
        return digest.hexdigest()
    for path in weight_files(model_dir):
        with _reading(path) as file:
            _update_with_tensors(digest, file)
    return digest.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except _DAMAGED as error:
        raise ModelError(f"{path} is not a readable safetensors file ({error}); download or copy it again") from error


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return (tensor entries by name, offset where the tensor data begins) of a safetensors file.

    Format: 8 bytes little-endian header length, JSON header, data (the safetensors README).
    """
    header_len = int.from_bytes(file.read(8), "little")
    if header_len > _MAX_HEADER_BYTES:
        raise ValueError(f"its header says that it has {header_len} bytes")
    header = json.loads(file.read(header_len))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + header_len


def _update_with_tensors(digest: "blake2b", file: BinaryIO) -> None:
    tensors, data_begin = _header(file)
    for name in sorted(tensors):
        entry = tensors[name]
        begin, end = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        _update_with_samples(digest, file, data_begin + begin, end - begin)


def _update_with_gguf(digest: "blake2b", path: Path) -> None:
    tensors = GgufFile(path).tensors
    with _reading(path) as file:
        for name in sorted(tensors):
            entry = tensors[name]
            digest.update(json.dumps([name, entry.type_id, entry.shape]).encode())
            _update_with_samples(digest, file, entry.begin, entry.num_bytes)


def _update_with_samples(digest: "blake2b", file: BinaryIO, begin: int, size: int) -> None:
    """Add the bytes of a tensor at `begin`: all of a small one, and samples of a larger one."""
    if size <= _FULLY_HASHED_BYTES:
        places = [(0, size)]
    else:
        places = [((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)]
    for offset, length in places:
        file.seek(begin + offset)
        piece = file.read(length)
        if len(piece) != length:
            raise ValueError("it is cut short")
        digest.update(piece)
