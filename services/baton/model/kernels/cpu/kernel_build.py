"""Compile the kernels, once for a machine and a version of their source, into the user's cache.

The compiler may use every instruction that this processor has, so the key of the cache holds what decides
that: processor flags, compiler, options, source. The cache is bounded: libraries that were not used for a
while go when a new one comes.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.core.errors import BatonError

HERE = Path(__file__).parent
SOURCES = ("attention.cpp", "decoder.cpp", "layers.cpp")
HEADERS = tuple(sorted(path.name for path in HERE.glob("*.h")))
NATIVE = "-march=native" if platform.machine() in {"x86_64", "AMD64", "i686"} else "-mcpu=native"
"""Every instruction of this processor: clang for ARM long knew but the second spelling."""
OPTIONS = ("-O3", NATIVE, "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_S = 120.0
MAX_KEPT = 4


class NoKernels(BatonError):
    """They cannot be had here; the message says why."""


def build(cache: Path | None = None) -> Path:
    """The library for this machine, compiled if it is not there yet; processes that start together compile it
    once. Raises NoKernels."""
    compiler = find_compiler()
    directory = cache if cache is not None else default_cache()
    library = directory / f"kernels-{_key(compiler)}.so"
    if library.exists():
        with suppress(OSError):
            library.touch()
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / "lock"):
            if not library.exists():
                _compile(compiler, library)
                _forget_old(directory)
    except OSError as error:
        raise NoKernels(f"{directory} cannot be written ({error.strerror or error})") from error
    return library


def find_compiler() -> str:
    """Its path. Raises NoKernels."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoKernels(f"no C++ compiler ({', '.join(COMPILERS)}) on the PATH")
    return compiler


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "baton" / "kernels"


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for text in (platform.machine(), _processor(), _version(compiler), *OPTIONS):
        digest.update(text.encode() + b"\0")
    for name in (*SOURCES, *HEADERS):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What the compiler sees of it; empty where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    return platform.processor()


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{compiler} cannot be run: {error}") from error
    return done.stdout.partition("\n")[0]


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="building-", dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        command = [compiler, *OPTIONS, *(str(HERE / name) for name in SOURCES), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoKernels(f"{compiler} did not end: {error}") from error
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
            raise NoKernels(f"{compiler} failed: {said}")
        with made.open("rb") as file:
            os.fsync(file.fileno())  # or a loss of power could leave an empty file under a name that says what is in it
        os.replace(made, library)


def _forget_old(directory: Path) -> None:
    """Under the lock, so that whatever was being built is of a process that was killed."""
    for left in directory.glob("building-*"):
        shutil.rmtree(left, ignore_errors=True)
    libraries = sorted(directory.glob("kernels-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in libraries[MAX_KEPT:]:
        with suppress(OSError):
            path.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for whoever compiles now, who ends within COMPILE_S."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
