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

    Digests are kept by real path, device, inode, size, and times of the last change of content and of the
    inode. Workers that start together hash once. The digest tells files apart, and is no protection against
    somebody who makes two files with the same one.

    say: told if hashing takes long. cache: None uses the user's cache directory. clock: seconds since 1970.
    Raises ModelError if a file cannot be read.
    """
    cache = cache or VerdictCache(user_cache.cache_directory("digests"))
    try:
        facts = _facts(paths)
        found = _kept(cache, facts, len(paths))
        if found is not None:
            return found
        with cache.locked(cache.path(facts).name[0], WAIT_S, on_wait=lambda: say(WAITING)):
            found = _kept(cache, facts, len(paths))  # hashed by another process meanwhile
            if found is None:
                is_settled = _is_settled(paths, clock())
                found = _hash(paths, say)
                if is_settled and _facts(paths) == facts:  # else they may have changed while they were read
                    cache.keep(facts, {"digests": found})
        return found
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read ({error}); download or copy it again") from error


def _facts(paths: Sequence[Path]) -> dict[str, str]:
    """Return what identifies the content of these files, in the form of a cache's facts."""
    content = json.dumps([user_cache.file_identity(path) for path in paths])
    return {"files": hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}


def _kept(cache: VerdictCache, facts: dict[str, str], number: int) -> list[str] | None:
    """Return the digests of this number of files; None if they are not in the cache."""
    digests: Any = (cache.find(facts) or {}).get("digests")
    is_right = isinstance(digests, list) and len(digests) == number and all(isinstance(each, str) for each in digests)
    return digests if is_right else None


def _is_settled(paths: Sequence[Path], now_s: float) -> bool:
    """True if any change of these files from now on will have another time than the last one."""
    return all(now_s - path.stat().st_ctime >= RECENT_S for path in paths)


def _hash(paths: Sequence[Path], say: Callable[[str], object]) -> list[str]:
    num_bytes, begin_s = sum(path.stat().st_size for path in paths), time.perf_counter()
    if num_bytes >= NOTABLE_BYTES:
        say(f"hashes the weights ({num_bytes / 1e9:.1f} GB), once per machine and version of the files")
    with ThreadPoolExecutor(THREADS, thread_name_prefix="hash") as pool:
        digests = list(pool.map(_digest, paths))
    elapsed_s = round(time.perf_counter() - begin_s, 3)
    log.info("weights_hashed", num_files=len(paths), num_bytes=num_bytes, seconds=elapsed_s)
    return digests


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        _expect_sequential_reads(file.fileno())
        return hashlib.file_digest(file, cast(Any, xxh3_128)).hexdigest()


def _expect_sequential_reads(fd: int) -> None:
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
