"""Loads a packed model from the user's cache, or packs it there, so that workers of a machine share it."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedModel

from baton.core.errors import BatonError
from baton.model.linear.pack_model import pack_model
from baton.model.linear.packer import WeightPacker
from baton.model.loading.image.image_file import ImageFile, ImageUnusable, ImageWriter
from baton.model.loading.image.image_memory import ImageMemory
from baton.model.loading.image.image_model import read_model, write_model
from baton.runtime import user_cache
from baton.runtime.logging import get_logger

log = get_logger(__name__)

_SUFFIX = ".weights"
_UNFINISHED = "new-"
_LOCK = "lock-"
_FORMAT = "weight_format"
RESERVED_BYTES = 1 << 30
"""Bytes of the disk that are left to others."""
ABANDONED_S = 3600.0
"""Age from which on an unfinished file is removed. A file that is being written changes every few seconds."""
_LAYOUT_SOURCES = (
    *("kernels/cpu/weight_format.h", "kernels/cpu/gemm_pack.h", "kernels/cpu/numbers.h"),
    *("linear/*.py", "loading/**/*.py"),
)
"""Sources that decide the bytes of a packed model, below baton/model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """A model whose linear layers are packed.

    weight_format: of the checkpoint, for people. mapped_bytes: of the file that processes share; the system
    counts them as free memory. 0 without a file.
    """

    model: PreTrainedModel
    weight_format: str
    mapped_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Makes a model without a file.

    fingerprint: see `model_fingerprint`.
    new_skeleton: returns it without weights. load: returns it with weights from the checkpoint, and their
    format. require_memory: raises ModelError if a number of bytes is more than what is free.
    """

    fingerprint: str
    new_skeleton: Callable[[], PreTrainedModel]
    load: Callable[[], tuple[PreTrainedModel, str]]
    require_memory: Callable[[int], None]


class PackedModelCache:
    """Files of packed models in one directory, those used last, up to a total size."""

    def __init__(self, max_bytes: int, directory: Path | None = None) -> None:
        """max_bytes: of all files; 0 keeps none. directory: None uses the user's cache directory."""
        self._max_bytes = max_bytes
        self._directory = directory or user_cache.cache_directory("weights")

    def load(self, source: ModelSource, packer: WeightPacker) -> PackedModel:
        """Return a model, from its file if there is one that fits, else from its checkpoint.

        Workers that start together pack it once. Whatever goes wrong with files is logged, and the model is
        loaded without one. Raises ModelError if the model cannot be loaded at all.
        """
        if not self._max_bytes:
            return load_unshared(source, packer)
        path = self._directory / f"{image_key(source.fingerprint, packer)}{_SUFFIX}"
        found = _read(path, source, packer)
        if found is not None:
            return found
        with ExitStack() as stack:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(user_cache.locked(self._directory / f"{_LOCK}{path.stem}"))
                found = _read(path, source, packer)  # made by another worker meanwhile
                return found or self._make(path, source, packer)
            except OSError as error:
                _warn("packed_model_not_written", path, error)
                return load_unshared(source, packer)

    def _make(self, path: Path, source: ModelSource, packer: WeightPacker) -> PackedModel:
        """Load the model, and write its file on the way. The caller holds the lock.

        Raises OSError if there can be no file.
        """
        self._remove_unfinished(path.stem)
        made = self._directory / f"{_UNFINISHED}{path.stem}-{os.getpid()}"
        writer = ImageWriter(made, max_bytes=self._max_bytes, reserved_bytes=RESERVED_BYTES)
        own_memory = packer.memory
        packer.memory = memory = ImageMemory(writer, own_memory)
        try:
            model, weight_format = _load(source, packer)
            try:
                if memory.problem is not None:
                    raise memory.problem
                writer.finish(write_model(model, memory) | {_FORMAT: weight_format})
                user_cache.publish(made, path)
            except Exception as error:  # a full disk, or model code that does not run in this way
                _warn("packed_model_not_written", path, error)
            else:
                others = self._directory.glob(f"*{_SUFFIX}")
                removed = user_cache.remove_oldest(others, keep=path, max_bytes=self._max_bytes)
                log.info("packed_model_written", path=str(path), num_bytes=writer.num_bytes, removed=len(removed))
            return PackedModel(model=model, weight_format=weight_format, mapped_bytes=writer.num_bytes)
        finally:
            packer.memory = own_memory
            writer.close()
            made.unlink(missing_ok=True)

    def _remove_unfinished(self, key: str) -> None:
        """Remove what killed processes left: files of this key, which is locked, old ones of others, and
        locks."""
        for left in self._directory.glob(f"{_UNFINISHED}*"):
            with suppress(FileNotFoundError):
                is_old = time.time() - left.stat().st_mtime > ABANDONED_S
                if is_old or left.name.startswith(f"{_UNFINISHED}{key}-"):
                    left.unlink()
        for lock in self._directory.glob(f"{_LOCK}*"):
            with suppress(OSError), user_cache.locked(lock, waits=False):
                pass  # no process holds it, so it is removed here


def image_key(fingerprint: str, packer: WeightPacker) -> str:
    """Return a digest of everything that decides the bytes of a packed model."""
    root, digest = Path(__file__).parents[2], blake2b(digest_size=16)
    facts = [fingerprint, packer.dtype, packer.native_is_faster, packer.kernels.has_bf16_dot]
    facts += [platform.machine(), sys.byteorder, *(version(library) for library in ("torch", "transformers"))]
    digest.update(json.dumps(facts, default=str).encode())
    for path in sorted(path for pattern in _LAYOUT_SOURCES for path in root.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, source: ModelSource, packer: WeightPacker) -> PackedModel | None:
    """Return the model of a file; None if there is none that can be used."""
    try:
        file = ImageFile(path)
    except FileNotFoundError:
        return None
    except (OSError, ImageUnusable) as error:
        _warn("packed_model_not_used", path, error)
        return None
    source.require_memory(file.num_bytes)
    try:
        model = _new_skeleton(source)
        for number, weight in enumerate(read_model(model, file, packer.kernels, packer.dtype)):
            if (problem := packer.problem_of(weight)) is not None:
                raise ImageUnusable(f"the product with weight {number} is wrong: {problem}")
    except ImageUnusable as error:
        _warn("packed_model_not_used", path, error)
        return None
    user_cache.use(path)
    log.info("packed_model_mapped", path=str(path), num_bytes=file.num_bytes)
    return PackedModel(model=model, weight_format=str(file.index[_FORMAT]), mapped_bytes=file.num_bytes)


def _new_skeleton(source: ModelSource) -> PreTrainedModel:
    try:
        return source.new_skeleton()
    except Exception as error:  # model code that does not run without weights
        problem = f"{type(error).__name__}: {error}"
        raise ImageUnusable(f"the model cannot be built without its weights: {problem}") from error


def load_unshared(source: ModelSource, packer: WeightPacker | None) -> PackedModel:
    """Return a model from its checkpoint, in memory of this process. Raises ModelError."""
    model, weight_format = _load(source, packer)
    return PackedModel(model=model, weight_format=weight_format, mapped_bytes=0)


def _load(source: ModelSource, packer: WeightPacker | None) -> tuple[PreTrainedModel, str]:
    model, weight_format = source.load()
    if packer is not None:
        pack_model(model, packer)
    return model, weight_format


def _warn(event: str, path: Path, error: Exception) -> None:
    problem = str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
    hint = "the model is loaded from its checkpoint, and its workers share no memory for it"
    log.warning(event, path=str(path), problem=problem, hint=hint)


NO_CACHE = PackedModelCache(0)
