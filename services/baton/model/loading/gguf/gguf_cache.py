"""Keeps the model directories that were made from GGUF files, in the user's cache. Imports no torch."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_parts import part_paths
from baton.runtime.logging import get_logger
from baton.runtime.process.process import python_module
from baton.runtime.user_cache import cache_directory, file_identity

log = get_logger(__name__)

MAX_DIRECTORIES = 16
"""Directories that are kept, those used last. Each has the size of a tokenizer, at most some 40 MB."""
CONVERTER = "baton.model.loading.gguf.gguf_directory"
CONVERSION = 5
"""Counts changes of the converter's results."""
CONVERT_S = 600
"""Longest duration of a conversion."""

MAX_LOGGED_TOKENS = 16
_UNFINISHED = "new-"
MAGIC = b"GGUF"

Convert = Callable[[Path, Path], None]


def is_gguf(path: Path) -> bool:
    """True for a readable file that begins as a GGUF file."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_directory(path: Path, *, cache: Path | None = None, convert: Convert | None = None) -> Path:
    """Return the model directory of a GGUF file, made by `convert` unless it is in the cache.

    path: of the file, or of any part of a split one. The key covers path, inode, size and times of each part,
    and the versions of the libraries that convert it. Raises ModelError if the file is damaged, incomplete or
    not supported, or if the cache cannot be written.
    """
    root = cache if cache is not None else default_gguf_cache()
    try:
        directory = root / _key(path)
        if directory.is_dir():
            os.utime(directory)
            return directory
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=_UNFINISHED) as new:
            made = Path(new) / "model"
            made.mkdir()
            # not resolved, because its own name leads to the other parts
            (convert or _convert_in_process)(path.absolute(), made)
            try:
                made.rename(directory)
            except OSError:
                if not directory.is_dir():  # else another process was faster
                    raise
        _remove_oldest(root, directory)
    except OSError as error:
        raise ModelError(f"{root} cannot be written ({error}); set XDG_CACHE_HOME to a directory that can") from error
    return directory


def default_gguf_cache() -> Path:
    """Return the directory of converted files, below XDG_CACHE_HOME or ~/.cache."""
    return cache_directory("gguf")


def _key(path: Path) -> str:
    versions = [version(library) for library in ("transformers", "tokenizers")]
    parts = [fact for part in part_paths(path) for fact in file_identity(part)]
    content = json.dumps([*parts, CONVERSION, *versions])
    return blake2b(content.encode(), digest_size=16).hexdigest()


def _convert_in_process(path: Path, directory: Path) -> None:
    command = [*python_module(CONVERTER), str(path), str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{path}: its conversion took more than {CONVERT_S} s; start again") from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ModelError(f"{path}: its conversion failed with exit code {done.returncode}: {last[0]}") from error
    if "problem" in answer:
        raise ModelError(answer["problem"])
    if mistyped := answer["mistyped"]:
        hint = "their types in the file are wrong; they are known texts, and count as control tokens, as in llama.cpp"
        log.warning("gguf_token_types_corrected", tokens=mistyped[:MAX_LOGGED_TOKENS], hint=hint)


def _remove_oldest(root: Path, keep: Path) -> None:
    """Remove the directories that were used longest ago, but `keep`, and what killed conversions left."""
    found = []
    for each in root.iterdir():
        with suppress(OSError):
            age_s = time.time() - each.stat().st_mtime
            if each.name.startswith(_UNFINISHED):
                if age_s > CONVERT_S:
                    shutil.rmtree(each, ignore_errors=True)
            elif each != keep:
                found.append((each.stat().st_mtime_ns, each))
    for _, old in sorted(found, reverse=True)[MAX_DIRECTORIES - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
