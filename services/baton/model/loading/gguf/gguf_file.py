"""Reads the header of a GGUF file and maps its tensors. Everything in the file is checked before it is used.

Source: the GGUF specification (ggml's docs/gguf.md), versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_cache import MAGIC
from baton.model.loading.gguf.gguf_parts import require_together
from baton.model.loading.gguf.gguf_types import block_shape, type_name

VERSIONS = (2, 3)
MAX_METADATA, MAX_TENSORS, MAX_DIMENSIONS = 1 << 16, 1 << 20, 4
MAX_STRING_BYTES = 32 << 20
MAX_ARRAY_ITEMS = 1 << 24
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` letters of the metadata types of fixed size."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of the file. shape: as in PyTorch, rows first. begin, num_bytes: of its data in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    begin: int
    num_bytes: int


class GgufFile:
    """A mapped GGUF file: metadata, table of tensors, and their bytes.

    Raises ModelError if a file is not a readable GGUF file or is cut short, or if parts do not belong
    together.
    """

    def __init__(self, *parts: Path) -> None:
        """parts: the file, or all parts of a split one (`part_paths`). The first has the metadata."""
        opened = [_open(path) for path in parts]
        require_together(parts, [each.metadata for each in opened], [each.tensors.keys() for each in opened])
        self.path = parts[0]
        self.metadata: Mapping[str, Any] = opened[0].metadata
        self.tensors: Mapping[str, TensorEntry] = {name: row for each in opened for name, row in each.tensors.items()}
        self._maps = {name: each.data for each in opened for name in each.tensors}

    def raw(self, entry: TensorEntry) -> torch.Tensor:
        """Return the bytes of a tensor, uint8 [num_bytes], as they are mapped. They must not be written."""
        view = memoryview(self._maps[entry.name])[entry.begin : entry.begin + entry.num_bytes]
        return _read_only_tensor(view) if entry.num_bytes else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A mapped file with its own metadata and tensors."""

    data: mmap.mmap
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


def _open(path: Path) -> _Part:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF file ({error}); download or copy it again") from error
    cursor = _Cursor(data, path)
    num_tensors = cursor.count("the number of tensors", MAX_TENSORS)
    metadata = _read_metadata(cursor)
    return _Part(data, metadata, _read_tensors(cursor, metadata, num_tensors))


def _read_only_tensor(view: memoryview) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors; the map is never written
        return torch.frombuffer(view, dtype=torch.uint8)


class _Cursor:
    """Position in the header. Every read is checked against the end of the file.

    It begins behind magic and version, which it checks.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.end = len(data)
        self.position = 0
        magic = data[:4]
        if magic != MAGIC:
            raise self.problem(f"it begins with {magic!r}; a GGUF file begins with {MAGIC!r}")
        self.position = 4
        (version,) = self.values("I", "the version")
        if version not in VERSIONS:
            hint = " (a big-endian file)" if version and not version & 0xFFFF else ""
            raise self.problem(f"its version is {version}{hint}; must be {' or '.join(map(str, VERSIONS))}")

    def problem(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is not a usable GGUF file: {what}; download or copy it again")

    def require(self, num_bytes: int, what: str) -> None:
        left = self.end - self.position
        if num_bytes > left:
            raise self.problem(f"{what} takes {num_bytes} bytes at byte {self.position}, and {left} are left")

    def values(self, letters: str, what: str) -> tuple[Any, ...]:
        form = f"<{letters}"
        self.require(struct.calcsize(form), what)
        found = struct.unpack_from(form, self._data, self.position)
        self.position += struct.calcsize(form)
        return found

    def count(self, what: str, limit: int) -> int:
        """Read a 64-bit number of things. Raises ModelError if it exceeds `limit`."""
        number: int = self.values("Q", what)[0]
        if number > limit:
            raise self.problem(f"{what} is {number}; must be at most {limit}")
        return number

    def text(self, what: str) -> str:
        length = self.count(f"the length of {what}", MAX_STRING_BYTES)
        self.require(length, what)
        begin, self.position = self.position, self.position + length
        try:
            return self._data[begin : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.problem(f"{what} is not UTF-8") from error


def _read_metadata(cursor: _Cursor) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("the number of metadata values", MAX_METADATA)):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.problem(f"the metadata key {key!r} occurs twice")
        (kind,) = cursor.values("I", f"the type of {key!r}")
        metadata[key] = _read_value(cursor, key, kind)
    return metadata


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind in _SCALARS:
        return cursor.values(_SCALARS[kind], f"{key!r}")[0]
    if kind == _STRING:
        return cursor.text(f"{key!r}")
    if kind != _ARRAY:
        raise cursor.problem(f"{key!r} has the unknown type {kind}")
    (kind,) = cursor.values("I", f"the type of {key!r}")
    number = cursor.count(f"the length of {key!r}", MAX_ARRAY_ITEMS)
    if kind in _SCALARS:
        return list(cursor.values(f"{number}{_SCALARS[kind]}", f"{key!r}"))
    if kind != _STRING:
        raise cursor.problem(f"{key!r} is an array of the unsupported type {kind}")
    cursor.require(8 * number, f"{key!r}")
    return [cursor.text(f"an entry of {key!r}") for _ in range(number)]


def _read_tensors(cursor: _Cursor, metadata: Mapping[str, Any], num_tensors: int) -> dict[str, TensorEntry]:
    """Read the table of tensors. Raises ModelError if any tensor is not completely in the file."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise cursor.problem(f"general.alignment is {alignment!r}; must be a positive multiple of 8")
    rows = [_read_tensor(cursor) for _ in range(num_tensors)]
    data_begin = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, type_id, offset in rows:
        num_bytes = _num_bytes(cursor, name, shape, type_id)
        begin = data_begin + offset
        if begin + num_bytes > cursor.end:
            raise cursor.problem(
                f"the tensor {name!r} is at bytes {begin} to {begin + num_bytes}, and the file has {cursor.end}"
            )
        if offset % alignment:
            raise cursor.problem(f"the tensor {name!r} is at offset {offset}; must be a multiple of {alignment}")
        if name in tensors:
            raise cursor.problem(f"the tensor {name!r} occurs twice")
        tensors[name] = TensorEntry(name=name, shape=shape, type_id=type_id, begin=begin, num_bytes=num_bytes)
    return tensors


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("a tensor's name")
    (num_dimensions,) = cursor.values("I", f"the shape of {name!r}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.problem(f"the tensor {name!r} has {num_dimensions} dimensions; must be 1 to {MAX_DIMENSIONS}")
    sizes = cursor.values(f"{num_dimensions}Q", f"the shape of {name!r}")
    if not all(sizes):
        raise cursor.problem(f"the tensor {name!r} has the shape {sizes}; no size may be 0")
    type_id, offset = cursor.values("IQ", f"the place of {name!r}")
    return name, tuple(reversed(sizes)), type_id, offset


def _num_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int) -> int:
    block = block_shape(type_id)
    if block is None:
        raise cursor.problem(f"the tensor {name!r} has the type {type_name(type_id)}, which cannot be read")
    num_values, num_bytes = block
    if shape[-1] % num_values:
        raise cursor.problem(
            f"the tensor {name!r} has rows of {shape[-1]} values; must be a multiple of {num_values}, "
            f"the block size of {type_name(type_id)}"
        )
    return prod(shape) // num_values * num_bytes
