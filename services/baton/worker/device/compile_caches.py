"""Keeps what inductor and Triton compile in the user's cache, for child processes and later starts."""

import os
import shutil
import stat
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from baton.runtime import user_cache
from baton.runtime.logging import get_logger

log = get_logger(__name__)

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables by which inductor and Triton find their caches, and the directories that they get."""
MAX_COMPILED_BYTES = 1 << 30
"""A larger cache is emptied at a start. The kernels of one model take some megabytes."""
IDLE_S = 3600.0
"""A cache in which something was written later than this ago is not emptied: another worker may compile."""


def share_compile_caches(environ: MutableMapping[str, str], directory: Path | None = None) -> None:
    """Name the caches in `environ`, which child processes inherit. Variables that are set stay as they are.

    Otherwise inductor's cache would be below /tmp, and Triton's would depend on what inductor has compiled in
    the same process before: a worker would then not find what its child has compiled. `directory`: None for
    the default. One that cannot be used is logged.
    """
    directory = directory or user_cache.cache_directory("compiled")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{directory} must be a directory that only this user can write to")
        _empty_if_large(directory)
        for variable, name in VARIABLES.items():
            if not environ.get(variable):
                (directory / name).mkdir(exist_ok=True)
                environ[variable] = str(directory / name)
    except OSError as error:
        log.warning("compile_caches_not_shared", problem=str(error), hint="each process compiles for itself")


def _empty_if_large(directory: Path) -> None:
    """Remove what was compiled if it takes more than `MAX_COMPILED_BYTES` and nothing is being compiled.

    Entries consist of several files that refer to each other, so single ones are not removed.
    """
    num_bytes, newest_s = 0, 0.0
    for path in directory.rglob("*"):
        with suppress(OSError):  # a process that compiles renames its files
            facts = path.lstat()
            if stat.S_ISREG(facts.st_mode):
                num_bytes, newest_s = num_bytes + facts.st_size, max(newest_s, facts.st_mtime)
    if num_bytes > MAX_COMPILED_BYTES and newest_s < time.time() - IDLE_S:
        for name in VARIABLES.values():
            shutil.rmtree(directory / name, ignore_errors=True)
        log.info("compile_caches_emptied", directory=str(directory), num_bytes=num_bytes)
