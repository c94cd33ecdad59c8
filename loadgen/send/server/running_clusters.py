"""Finds the Baton clusters that this user runs on this machine, by the run files of `baton up`.

`baton.runtime.process.run_file` writes and describes the files. They are read here once more, because loadgen
does not depend on Baton's services. Files that cannot be understood are ignored.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_PROC = Path("/proc")
_MAX_BYTES = 64 * 1024
_LOCAL = {"localhost": "127.0.0.1", "::1": "127.0.0.1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A cluster of this user: HTTP URL and gRPC address of its gateway, model, and start as Unix time."""

    url: str
    gateway: str
    model: str
    started_s: float
    needs_key: bool


def running_clusters(environ: Mapping[str, str]) -> list[LocalCluster]:
    """Return the running clusters of this user, newest first."""
    found = [cluster for folder in _folders(environ) for file in _files(folder) if (cluster := _read(file))]
    return sorted(found, key=lambda cluster: -cluster.started_s)


def is_same_address(one: str, other: str) -> bool:
    """Return True if two URLs or addresses name the same port."""
    return _host_and_port(one) == _host_and_port(other)


def _folders(environ: Mapping[str, str]) -> list[Path]:
    if given := environ.get("BATON_RUN_DIR"):
        return [Path(given)]
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    runtime = environ.get("XDG_RUNTIME_DIR")
    return [*([Path(runtime) / "baton"] if runtime else []), Path(cache) / "baton" / "run"]


def _files(folder: Path) -> list[Path]:
    """List the run files of a directory, if only this user can write to it."""
    try:
        facts = folder.lstat()
        is_private = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
        return sorted(folder.glob("*.json")) if is_private else []
    except OSError:
        return []


def _read(file: Path) -> LocalCluster | None:
    """Read a run file. Return None if its process has ended, or if it is not understood."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as stream:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                return None
            content: Any = json.loads(stream.read(_MAX_BYTES))
        if content["identity"] != _identity(int(content["pid"])):
            return None
        return LocalCluster(
            url=str(content["url"]),
            gateway=str(content["gateway"]),
            model=str(content["model"]),
            started_s=float(content["started_s"]),
            needs_key=bool(content.get("needs_key", False)),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _identity(pid: int) -> str:
    """Return `HOST/BOOT/PID_NAMESPACE/START` of a living process, or "" if there is none."""
    try:
        if sys.platform != "linux":
            import psutil

            return f"{socket.gethostname().replace('/', '_')}///{psutil.Process(pid).create_time():.0f}"
        words = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
    except Exception:  # whatever the system does not tell, or psutil raises
        return ""
    return "" if words[0] in "ZX" else f"{socket.gethostname().replace('/', '_')}/{boot}/{namespace}/{words[19]}"


def _host_and_port(address: str) -> tuple[str, int | None]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        port = parts.port
    except ValueError:
        port = None
    host = parts.hostname or ""
    return _LOCAL.get(host, host), port or {"http": 80, "https": 443}.get(parts.scheme)
