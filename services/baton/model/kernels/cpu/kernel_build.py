"""Compiles the C++ kernels once per machine and source version, into the user's cache directory.

The compiler may use every instruction of this processor. The cache key therefore covers processor flags,
compiler, options and source. Only the few libraries used last are kept.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from baton.core.errors import BatonError
from baton.runtime import user_cache
from baton.runtime.child.child_process import run_program

HERE = Path(__file__).parent
SOURCES = ("attention.cpp", "decoder.cpp", "layers.cpp", "linear.cpp", "sampling.cpp")
HEADERS = tuple(sorted(path.name for path in HERE.glob("*.h")))
NATIVE = "-march=native" if platform.machine() in {"x86_64", "AMD64", "i686"} else "-mcpu=native"
"""Option to use every instruction of this processor. clang for ARM did not support `-march=native` for
long."""
OPTIONS = ("-O3", NATIVE, "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_S = 600.0
"""Longest compilation, less than `worker_start_s`. A worker without its library is slow for as long as it
lives, so a busy machine gets much more time than an idle one needs."""
_VERSION_S = 60.0
MAX_CACHED_LIBRARIES = 4


class KernelsUnavailable(BatonError):
    """The kernels cannot be compiled or loaded here. The message gives the reason."""


def build(cache: Path | None = None, options: Sequence[str] = OPTIONS) -> Path:
    """Return the kernel library for this machine; compile it if it is not cached.

    `options`: of the compiler; tests give others. Processes that start together compile it once. Raises
    KernelsUnavailable if there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    directory = cache if cache is not None else default_cache()
    library = directory / library_name(compiler, options)
    if user_cache.use(library):
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with user_cache.locked(directory / "lock"):  # held for about COMPILE_S at most
            if not user_cache.use(library):
                _compile(compiler, options, library)
                _evict_old_libraries(directory, library)
    except OSError as error:
        raise KernelsUnavailable(f"{directory} cannot be written ({error.strerror or error})") from error
    return library


def find_compiler() -> str:
    """Return the path of a C++ compiler. Raises KernelsUnavailable if there is none."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise KernelsUnavailable(f"no C++ compiler ({', '.join(COMPILERS)}) on the PATH")
    return compiler


def library_name(compiler: str, options: Sequence[str] = OPTIONS) -> str:
    """Return the file name of the library for this machine, these sources, this compiler and its options.

    Raises KernelsUnavailable if the compiler cannot be run.
    """
    digest = hashlib.sha256()
    for text in (platform.machine(), _processor(), _version(compiler), *options):
        digest.update(text.encode() + b"\0")
    for name in (*SOURCES, *HEADERS):
        digest.update((HERE / name).read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}.so"


def default_cache() -> Path:
    """Return the directory of compiled libraries, below XDG_CACHE_HOME or ~/.cache."""
    return user_cache.cache_directory("kernels")


def _processor() -> str:
    """Return the processor's instruction set flags; empty if the system does not list them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    return platform.processor()


def _version(compiler: str) -> str:
    try:
        done = run_program([compiler, "--version"], _VERSION_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{compiler} cannot be run: {error}") from error
    return done.stdout.partition("\n")[0]


def _compile(compiler: str, options: Sequence[str], library: Path) -> None:
    """Compile the sources, on all processors, then link them."""
    end_s = time.monotonic() + COMPILE_S
    with tempfile.TemporaryDirectory(prefix="building-", dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        objects = [str(Path(scratch) / f"{name}.o") for name in SOURCES]
        each = zip(SOURCES, objects, strict=True)
        commands = [[compiler, *options, "-c", str(HERE / source), "-o", target] for source, target in each]
        with ThreadPoolExecutor(max_workers=min(len(commands), os.cpu_count() or 1)) as pool:
            list(pool.map(lambda command: _run(command, end_s), commands))
        _run([compiler, *options, *objects, "-o", str(made)], end_s)
        user_cache.publish(made, library)


def _run(command: Sequence[str], end_s: float) -> None:
    """Run the compiler, at the latest until `end_s` of the monotonic clock.

    Raises KernelsUnavailable if it fails.
    """
    try:
        done = run_program(command, max(0.0, end_s - time.monotonic()))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]} did not finish: {error}") from error
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
        raise KernelsUnavailable(f"{command[0]} failed: {reason}")


def _evict_old_libraries(directory: Path, newest: Path) -> None:
    """Delete unfinished builds and all but the most recently used libraries. The caller holds the lock.

    Because of the lock, any unfinished build belongs to a process that was killed.
    """
    for left in directory.glob("building-*"):
        shutil.rmtree(left, ignore_errors=True)
    user_cache.remove_oldest(directory.glob("kernels-*.so"), keep=newest, max_number=MAX_CACHED_LIBRARIES)
