"""Checks of the installed software, and of the ports and directories that `baton up` uses."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from baton.core.errors import ConfigError, StoreUnavailable
from baton.fleet.doctor.doctor_check import Finding, fail, ok, warn
from baton.runtime.config.settings import ClusterConfig, load_settings
from baton.runtime.network.addresses import choose_port
from baton.store.redis.private_redis import find_server

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
COMPILERS = ("c++", "g++", "clang++")
MIN_DISK_BYTES = 2 * 2**30
TOOL_TIMEOUT_S = 10.0


def python() -> Iterator[Finding]:
    """Check the Python version."""
    yield python_finding(sys.version_info[:3])


def python_finding(found: tuple[int, int, int]) -> Finding:
    """Return the finding about Python. `found`: major, minor and micro version."""
    shown = ".".join(map(str, found))
    if OLDEST_PYTHON <= found[:2] <= NEWEST_PYTHON:
        return ok("python", shown)
    return fail("python", shown, "install Python 3.11, 3.12 or 3.13, and create a new environment with it")


def pytorch() -> Iterator[Finding]:
    """Check that PyTorch and transformers are installed, without importing them, which takes seconds."""
    yield pytorch_finding(_installed("torch"), _installed("transformers"), cuda_of_pytorch())


def pytorch_finding(torch: str | None, transformers: str | None, cuda: str | None) -> Finding:
    """Return the finding about PyTorch. The arguments are version strings, or None if absent."""
    if torch is None or transformers is None:
        return fail(
            "pytorch",
            f"{'torch' if torch is None else 'transformers'} is not installed",
            "install Baton again: a package that it needs is missing",
        )
    return ok("pytorch", f"torch {torch} ({f'CUDA {cuda}' if cuda else 'CPU only'}), transformers {transformers}")


def cuda_of_pytorch() -> str | None:
    """Return the CUDA version of the installed PyTorch, or None if it has no CUDA or is not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    built = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda\b.*= '([^']*)'", built.read_text() if built.exists() else "", re.MULTILINE)
    return match[1] if match else None


def compiler() -> Iterator[Finding]:
    """Check that a C++ compiler exists, which builds the CPU kernels."""
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        yield warn(
            "compiler", "no C++ compiler", "the model runs on plain PyTorch, more slowly; install g++ or clang++"
        )
    else:
        yield ok("compiler", found)


def redis(
    environ: Mapping[str, str] = os.environ, find: Callable[[Mapping[str, str]], Path] = find_server
) -> Iterator[Finding]:
    """Check the Redis at BATON_REDIS_URL if set, else the server program that `baton up` would start."""
    url = environ.get("BATON_REDIS_URL")
    if url:
        yield asyncio.run(_redis_at(url))
        return
    try:
        server = find(environ)
    except ConfigError as error:
        yield fail("redis", "no server found", str(error))
        return
    yield ok("redis", f"{server}, {_version_of(server)}")


async def _redis_at(url: str) -> Finding:
    from baton.store.redis.redis_connection import RedisConnection

    try:
        connection = RedisConnection(url)
    except ConfigError as error:
        return fail("redis", "BATON_REDIS_URL is invalid", str(error))
    try:
        await connection.ping()
    except StoreUnavailable as error:
        return fail(
            "redis", str(error), "start that server, or unset BATON_REDIS_URL so that `baton up` starts its own"
        )
    finally:
        await connection.aclose()
    return ok("redis", f"answers at {connection.address} (BATON_REDIS_URL)")


def ray() -> Iterator[Finding]:
    """Check that Ray is installed."""
    found = _installed("ray")
    yield (
        ok("ray", found)
        if found
        else fail("ray", "not installed", "install Baton again: a package that it needs is missing")
    )


def ports(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that the default client ports of `baton up` are free (or those from the environment)."""
    config = load_settings(ClusterConfig, flags={}, environ=environ).config
    for name, port in (("http", config.http_port), ("grpc", config.grpc_port)):
        try:
            choose_port(config.host, port, flag=f"--{name}-port")
        except ConfigError as error:
            yield warn(f"port {port}", "in use", str(error))
        else:
            yield ok(f"port {port}", f"free ({name})")


def directories(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that the directories for downloaded models and for logs can be written."""
    from huggingface_hub import constants

    yield directory_finding("model cache", Path(constants.HF_HUB_CACHE), "set HF_HOME to a writable directory")
    log_dir = load_settings(ClusterConfig, flags={}, environ=environ).config.log_dir
    if log_dir is not None:
        yield directory_finding("logs", log_dir.expanduser(), "set --log-dir to a writable directory")


def directory_finding(name: str, path: Path, advice: str) -> Finding:
    """Return a warning if `path` cannot be written or created, or has little space. Creates nothing."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return warn(name, f"{path} is not writable", advice)
    free = shutil.disk_usage(existing).free
    found = f"{path}, {free / 2**30:.1f} GiB free"
    if free < MIN_DISK_BYTES:
        return warn(name, found, f"a model with 0.6 B parameters needs 1.4 GiB; free some space, or {advice}")
    return ok(name, found)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _version_of(server: Path) -> str:
    """Return the name and version of a Redis server program, or why it does not run."""
    try:
        done = subprocess.run(
            [server, "--version"], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
    except (subprocess.SubprocessError, OSError) as error:
        return f"which cannot be executed: {error}"
    match = re.match(r"(?P<name>[\w ]+?) v=(?P<version>\S+)", done.stdout)
    return f"{match['name']} {match['version']}" if match else "unknown version"
