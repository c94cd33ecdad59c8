"""Checks of what is installed, and of the ports and directories that `baton up` uses."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from baton.core.errors import ConfigError, StoreUnavailable
from baton.fleet.doctor.doctor_check import Finding, fail, ok, warn
from baton.runtime.config.settings import ClusterConfig, load_settings
from baton.runtime.network.addresses import choose_port

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
COMPILERS = ("c++", "g++", "clang++")
LEAST_DISK_BYTES = 2 * 2**30
TOOL_LIMIT_S = 10.0


def python() -> Iterator[Finding]:
    yield python_finding(sys.version_info[:3])


def python_finding(found: tuple[int, int, int]) -> Finding:
    shown = ".".join(map(str, found))
    if OLDEST_PYTHON <= found[:2] <= NEWEST_PYTHON:
        return ok("python", shown)
    return fail("python", shown, "install Python 3.11, 3.12 or 3.13, and make a new environment with it")


def pytorch() -> Iterator[Finding]:
    """Not imported: that takes seconds."""
    yield pytorch_finding(_installed("torch"), _installed("transformers"), cuda_of_pytorch())


def pytorch_finding(torch: str | None, transformers: str | None, cuda: str | None) -> Finding:
    if torch is None or transformers is None:
        return fail(
            "pytorch", f"{'torch' if torch is None else 'transformers'} is not installed", "pip install baton-serve"
        )
    return ok("pytorch", f"torch {torch} ({f'CUDA {cuda}' if cuda else 'CPU only'}), transformers {transformers}")


def cuda_of_pytorch() -> str | None:
    """The CUDA that PyTorch was built for; None for a build without, and where there is no PyTorch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    built = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda\b.*= '([^']*)'", built.read_text() if built.exists() else "", re.MULTILINE)
    return match[1] if match else None


def compiler() -> Iterator[Finding]:
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        yield warn("compiler", "no C++ compiler", "the model runs through torch, slower; install g++ or clang++")
    else:
        yield ok("compiler", found)


def redis(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The Redis that BATON_REDIS_URL names, else the server that `baton up` would start."""
    from baton.store.redis.private_redis import find_server

    url = environ.get("BATON_REDIS_URL")
    if url:
        yield asyncio.run(_redis_at(url))
        return
    try:
        server = find_server(environ)
    except ConfigError as error:
        yield fail("redis", "no server", str(error))
        return
    yield ok("redis", f"{server}, {_version_of(server)}")


async def _redis_at(url: str) -> Finding:
    from baton.store.redis.redis_connection import RedisConnection

    try:
        connection = RedisConnection(url)
    except ConfigError as error:
        return fail("redis", "BATON_REDIS_URL cannot be used", str(error))
    try:
        await connection.ping()
    except StoreUnavailable as error:
        return fail("redis", str(error), "start it, or unset BATON_REDIS_URL: `baton up` then starts one of its own")
    finally:
        await connection.aclose()
    return ok("redis", f"answers at {connection.where} (BATON_REDIS_URL)")


def ray() -> Iterator[Finding]:
    found = _installed("ray")
    yield ok("ray", found) if found else fail("ray", "not installed", "pip install baton-serve")


def ports(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Those that `baton up` opens for clients, unless a flag or file says otherwise."""
    config = load_settings(ClusterConfig, flags={}, environ=environ).config
    for name, port in (("http", config.http_port), ("grpc", config.grpc_port)):
        try:
            choose_port(config.host, port, flag=f"--{name}-port")
        except ConfigError as error:
            yield warn(f"port {port}", "taken", str(error))
        else:
            yield ok(f"port {port}", f"free ({name})")


def directories(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Where models and logs go, unless a flag or file says otherwise."""
    from huggingface_hub import constants

    yield directory_finding(
        "model cache", Path(constants.HF_HUB_CACHE), "set HF_HOME to a directory that you can write"
    )
    log_dir = load_settings(ClusterConfig, flags={}, environ=environ).config.log_dir
    if log_dir is not None:
        yield directory_finding("logs", log_dir.expanduser(), "give --log-dir a directory that you can write")


def directory_finding(name: str, path: Path, advice: str) -> Finding:
    """Whether `path` can be written, or made where it does not exist yet; nothing is."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return warn(name, f"{path} cannot be written", advice)
    free = shutil.disk_usage(there).free
    found = f"{path}, {free / 2**30:.1f} GiB free"
    if free < LEAST_DISK_BYTES:
        return warn(name, found, f"a model of 0.6 B parameters takes 1.4 GiB; free some space, or {advice}")
    return ok(name, found)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _version_of(server: Path) -> str:
    """`Valkey server 9.1.2`; what is wrong with it where it does not run."""
    try:
        done = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False)
    except (subprocess.SubprocessError, OSError) as error:
        return f"which does not run: {error}"
    match = re.match(r"(?P<what>[\w ]+?) v=(?P<version>\S+)", done.stdout)
    return f"{match['what']} {match['version']}" if match else "of a version that it does not say"
