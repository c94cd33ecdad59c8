"""Hashes files of weights completely, and keeps the digests in the user's cache so that it is done once."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from xxhash import xxh3_128

from baton.core.errors import ModelError
from baton.runtime import user_cache
from baton.runtime.child.verdict_cache import VerdictCache
from baton.runtime.logging import get_logger

log = get_logger(__name__)

THREADS = 4
"""Files that are read at once, because many file systems are faster with several readers."""
NOTABLE_BYTES = 1 << 30
"""Size from which on reading takes a second or more on most machines."""
RECENT_S = 2.0
"""Age of a change within which a second one could have the same time: some file systems
count in steps of two seconds."""
MAX_FILES = 2048
"""Files whose digests are kept, those used last. A large checkpoint has some 200 files."""
WAIT_S = 600.0
"""Longest wait for another process that hashes the same files."""
WAITING = "waits for another process, which hashes the weights"


def weight_digests(
    paths: Sequence[Path],
    *,
    say: Callable[[str], object] = lambda text: None,
    cache: VerdictCache | None = None,
    clock: Callable[[], float] = time.time,
) -> list[str]:
    """Return the XXH3-128 digest of all bytes of each file, in hexadecimal.

    Each digest is kept as soon as it is known, so a process that is killed while it hashes reads only the
    other files again. It is kept by the file's real path, device, inode, size, and times of the last change
    of content and of the inode. Workers that start together hash once. The digest tells files apart, and is
    no protection against somebody who makes two files with the same one.

    say: told if hashing takes long. cache: None uses the user's cache directory. clock: seconds since 1970.
    Raises ModelError if a file cannot be read.
    """
    cache = cache or VerdictCache(user_cache.cache_directory("digests"), max_verdicts=MAX_FILES)
    try:
        found = _kept(cache, paths)
        if len(found) < len(set(paths)):
            with cache.locked(_lock_name(cache, paths), WAIT_S, on_wait=lambda: say(WAITING)):
                found = _kept(cache, paths)  # hashed by another process meanwhile
                missing = [path for path in paths if path not in found]
                found |= _hash(missing, cache, say, clock)
        return [found[path] for path in paths]
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read ({error}); download or copy it again") from error


def _facts(path: Path) -> dict[str, str]:
    """Return what identifies the content of a file, in the form of a cache's facts."""
    return {"file": json.dumps(user_cache.file_identity(path))}


def _lock_name(cache: VerdictCache, paths: Sequence[Path]) -> str:
    """Return the name of the lock for these files, so that other models are not waited for."""
    return cache.path({str(number): _facts(path)["file"] for number, path in enumerate(paths)}).stem


def _kept(cache: VerdictCache, paths: Sequence[Path]) -> dict[Path, str]:
    """Return the digests that are in the cache."""
    found: dict[Path, Any] = {path: (cache.find(_facts(path)) or {}).get("digest") for path in paths}
    return {path: digest for path, digest in found.items() if isinstance(digest, str)}


def _hash(
    paths: Sequence[Path], cache: VerdictCache, say: Callable[[str], object], clock: Callable[[], float]
) -> dict[Path, str]:
    """Return the digests of these files, and keep them."""
    if not paths:
        return {}
    num_bytes, begin_s = sum(path.stat().st_size for path in paths), time.perf_counter()
    if num_bytes >= NOTABLE_BYTES:
        say(f"hashes the weights ({num_bytes / 1e9:.1f} GB), once as long as the cache is kept")
    with ThreadPoolExecutor(THREADS, thread_name_prefix="hash") as pool:
        digests = dict(zip(paths, pool.map(lambda path: _hash_file(path, cache, clock), paths), strict=True))
    elapsed_s = round(time.perf_counter() - begin_s, 3)
    log.info("weights_hashed", num_files=len(paths), num_bytes=num_bytes, seconds=elapsed_s)
    return digests


def _hash_file(path: Path, cache: VerdictCache, clock: Callable[[], float]) -> str:
    facts, is_settled = _facts(path), _is_settled(path, clock())
    digest = _digest(path)
    if is_settled and _facts(path) == facts:  # else it may have changed while it was read
        cache.keep(facts, {"digest": digest})
    return digest


def _is_settled(path: Path, now_s: float) -> bool:
    """True if any change of a file from now on will have another time than the last one."""
    return now_s - path.stat().st_ctime >= RECENT_S


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        _expect_sequential_reads(file.fileno())
        return hashlib.file_digest(file, cast(Any, xxh3_128)).hexdigest()


def _expect_sequential_reads(fd: int) -> None:
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
